"""Events and commands as JSON: what the event log and the outbox hold.

A dataclass becomes `{"type": its name, field: value, ...}`, fields at their default left out; a NamedTuple becomes a
list. Reading back goes by the type hints, so what was written with one version is read with the same one.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from laminar.control import commands, events
from laminar.control.manager import Record
from laminar.errors import ProtocolError

_KINDS: Mapping[str, type] = {
    kind.__name__: kind
    for union in (events.Event, events.StoreEvent, commands.Command)
    for kind in typing.get_args(union)
}
_HINTS: dict[type, dict[str, Any]] = {}


def encode(value: object) -> Any:
    """A JSON value for an event, a command, or anything inside one."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out: dict[str, Any] = {"type": type(value).__name__}
        for f in dataclasses.fields(value):
            item = getattr(value, f.name)
            if f.default is dataclasses.MISSING or item != f.default:
                out[f.name] = encode(item)
        return out
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    return value


def decode(data: Mapping[str, Any]) -> Any:
    """The event or command that `encode` wrote. Raises ProtocolError for an unknown type."""
    kind = _KINDS.get(data["type"])
    if kind is None:
        raise ProtocolError(f"unknown record {data['type']!r}")
    return _decode(data, kind)


def encode_record(record: Record) -> dict[str, Any]:
    return {
        "now": record.now,
        "event": encode(record.event),
        "commands": [encode(c) for c in record.commands],
    }


def decode_record(data: Mapping[str, Any]) -> Record:
    return Record(data["now"], decode(data["event"]), tuple(decode(c) for c in data["commands"]))


def _decode(data: Any, hint: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(hint)
        if data is None:
            return None
        if isinstance(data, dict) and "type" in data:
            return _decode(data, next(o for o in options if getattr(o, "__name__", "") == data["type"]))
        return _decode(data, next(o for o in options if o is not type(None)))
    if origin is tuple:
        items = typing.get_args(hint)
        if len(items) == 2 and items[1] is Ellipsis:
            return tuple(_decode(d, items[0]) for d in data)
        return tuple(_decode(d, h) for d, h in zip(data, items, strict=True))
    if dataclasses.is_dataclass(hint):
        hints = _hints(typing.cast(type, hint))
        return typing.cast(type, hint)(**{k: _decode(v, hints[k]) for k, v in data.items() if k != "type"})
    if isinstance(hint, type) and issubclass(hint, tuple):
        return hint(*data)
    return data


def _hints(kind: type) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]
