"""What a set of weights looks like: the layout of its bytes, and the manifest that vouches for them.

A `Layout` is fixed for a run; a `Manifest` comes with each version. Both are plain JSON on disk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final

import xxhash

from laminar.errors import WeightsError
from laminar.types import Version

if TYPE_CHECKING:
    import torch

HEADER_ALIGNMENT: Final = 64

# name -> (name in a safetensors header, bytes of an element)
_DTYPES: Final = {"fp32": ("F32", 4), "bf16": ("BF16", 2)}


@dataclass(frozen=True, slots=True)
class TensorRange:
    """Where one tensor lies in a weight file."""

    name: str
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the start of the file."""
    stop: int
    """One past the last byte."""


class Layout:
    """The byte ranges of all tensors of a model in one file that stock safetensors can open.

    Tensors lie in the order they were given, without gaps, all in the published dtype. The header depends on
    nothing but the layout, so it is written once and never while weights change.
    """

    def __init__(self, dtype: str, named_shapes: Iterable[tuple[str, Sequence[int]]]) -> None:
        if dtype not in _DTYPES:
            raise WeightsError(f"weights can't be published as {dtype!r}; known are {', '.join(_DTYPES)}")
        header_dtype, self.itemsize = _DTYPES[dtype]
        self.dtype = dtype
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in named_shapes:
            if name in shapes or name == "__metadata__":
                raise WeightsError(f"a layout can't hold a tensor named {name!r} (twice, or reserved)")
            shapes[name] = tuple(shape)

        offsets: dict[str, tuple[int, int]] = {}
        end = 0
        for name, shape in shapes.items():
            offsets[name] = (end, end + prod(shape) * self.itemsize)
            end = offsets[name][1]
        entries: dict[str, object] = {
            name: {"dtype": header_dtype, "shape": list(shape), "data_offsets": list(offsets[name])}
            for name, shape in shapes.items()
        }
        text = json.dumps({"__metadata__": {"format": "pt"}} | entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % HEADER_ALIGNMENT)
        self.header = len(text).to_bytes(8, "little") + text
        """The first bytes of every file of this layout."""

        data = len(self.header)
        self.size = data + end
        """Bytes of a whole file."""
        self.tensors: dict[str, TensorRange] = {
            name: TensorRange(name, shape, data + offsets[name][0], data + offsets[name][1])
            for name, shape in shapes.items()
        }
        """By name, in the order of the file."""
        self.digest = xxhash.xxh3_128_hexdigest(self.header)
        """Two layouts with the same digest are the same."""

    @classmethod
    def of(cls, named_shapes: Iterable[tuple[str, Sequence[int]]], dtype: str) -> Layout:
        """The layout of these tensors, in this order.

        Args:
            named_shapes: unfused Hugging Face names, tied duplicates left out.
            dtype: what is published, `fp32` or `bf16`.

        Raises:
            WeightsError: an unknown dtype, or a name given twice.
        """
        return cls(dtype, named_shapes)

    @property
    def torch_dtype(self) -> torch.dtype:
        """For those who have tensors: the layout itself needs no torch."""
        import torch

        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.dtype]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and other.header == self.header

    def __hash__(self) -> int:
        return hash(self.header)

    def __iter__(self) -> Iterator[TensorRange]:
        return iter(self.tensors.values())

    def __len__(self) -> int:
        return len(self.tensors)

    def to_json(self) -> str:
        shapes = [[entry.name, list(entry.shape)] for entry in self]
        return json.dumps({"dtype": self.dtype, "digest": self.digest, "tensors": shapes})

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Raises `WeightsError` if the text describes another layout than its digest says."""
        fields = json.loads(text)
        layout = cls(fields["dtype"], [(name, shape) for name, shape in fields["tensors"]])
        if layout.digest != fields["digest"]:
            raise WeightsError(f"layout {layout.digest} was stored as {fields['digest']}")
        return layout


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one version of the weights must be, byte for byte."""

    version: Version
    dtype: str
    fingerprint: str
    """`fingerprint_of(digests)`"""
    digests: tuple[str, ...]
    """xxh3 of each tensor's bytes, hexadecimal, in the order of the layout."""
    golden: tuple[float, ...]
    """The trainer's log-probs on the golden prompt."""
    layout: str
    """Digest of the layout."""

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": list(self.version),
                "dtype": self.dtype,
                "fingerprint": self.fingerprint,
                "digests": self.digests,
                "golden": self.golden,
                "layout": self.layout,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        fields = json.loads(text)
        return cls(
            version=Version(*fields["version"]),
            dtype=fields["dtype"],
            fingerprint=fields["fingerprint"],
            digests=tuple(fields["digests"]),
            golden=tuple(fields["golden"]),
            layout=fields["layout"],
        )


def fingerprint_of(digests: Iterable[str]) -> str:
    """xxh3 over the digests of all tensors in the order of the layout, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(digest) for digest in digests))
