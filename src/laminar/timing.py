"""How long things take: profiles of hardware and models, for whoever emulates or simulates them.

A profile is a flat TOML file of numbers in seconds, tokens and bytes; those that come with the package say beside
each number where it is from. Lengths and latencies are drawn by key, not in order: who draws first changes nothing.
"""

from __future__ import annotations

import hashlib
import tomllib
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from math import log2
from pathlib import Path
from statistics import NormalDist
from struct import pack
from typing import Any

from laminar.errors import ConfigError

COALESCE_S = 0.02
"""With few replicas, one reports a finished sample within this time, together with those that finish meanwhile."""
TICK_S = 0.5
"""Between two ticks of the manager, which take in what was said since the last and needed no answer."""

PROFILES = Path(__file__).parent / "profiles"

Quantiles = tuple[tuple[float, float], ...]
"""(probability, value), both rising, from probability 0 to 1; linear in between."""

_NORMAL = NormalDist()


def together_s(num_replicas: int, at_least: float) -> float:
    """How long news waits for more of its kind before it travels, in seconds.

    The more replicas talk, the less often each does, so that the data store answers some fifty calls a second, of few
    or of many; half a second is nothing to a fleet that is large enough to need it.
    """
    return max(at_least, min(0.5, 0.02 * (num_replicas - 6)))


@dataclass(frozen=True, slots=True)
class Profile:
    """One model on one kind of hardware."""

    name: str

    gpus_per_replica: int
    step_s: float
    """Constant part of one decode step."""
    step_s_per_sequence: float
    step_s_per_kv_token: float
    """For each token whose keys and values are read, which are those of all running sequences."""
    prefill_tokens_per_s: float
    kv_tokens: int
    """Room for keys and values in a replica."""
    max_num_seqs: int
    """Sequences a replica decodes at once, at most."""

    prompt_tokens: int
    max_response_tokens: int
    response_quantiles: Quantiles
    """Length of a response in tokens."""
    correlation: float
    """Between the lengths of two responses to one prompt, 0 … 1 (of their normal scores)."""
    reward_s: float
    """From the end of a response to its reward."""

    train_tokens_per_s_per_gpu: float
    train_s_per_mini_batch: float
    train_s_per_iteration: float

    weight_bytes: int
    """As published."""
    publish_stall_s: float
    """How long the trainer stands still to hand its weights to the relay of its machine."""
    broadcast_s_per_gb: float
    broadcast_s_per_gb_per_doubling: float
    """Added for each doubling of the number of machines."""
    load_weights_s: float
    """A replica loads a version that the relay of its machine holds."""
    switch_s: float
    """Colocated GPUs go from generation to training and back, once an iteration, the weights included."""

    train_gpus_multiple: int = 1
    """A trainer has a multiple of so many GPUs: those that hold the model and the state of its optimizer once."""
    tool_calls: int = 0
    """Calls of a tool in each response, evenly spread over it."""
    tool_latency_quantiles: Quantiles = ()
    """Seconds a call."""

    def __post_init__(self) -> None:
        """Raises ConfigError for numbers that mean nothing."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < 0:
                raise self._problem(field.name, "a number >= 0", value)
        for name in ("gpus_per_replica", "prefill_tokens_per_s", "kv_tokens", "max_num_seqs", "prompt_tokens",
                     "max_response_tokens", "train_tokens_per_s_per_gpu", "weight_bytes"):  # fmt: skip
            if getattr(self, name) == 0:
                raise self._problem(name, "more than 0", 0)
        if self.step_s + self.step_s_per_sequence == 0:
            raise self._problem("step_s", "a decode step that takes time", 0)
        if self.correlation > 1:
            raise self._problem("correlation", "0 … 1", self.correlation)
        self._check_quantiles("response_quantiles", self.response_quantiles)
        if self.tool_calls:
            self._check_quantiles("tool_latency_quantiles", self.tool_latency_quantiles)

    def _check_quantiles(self, name: str, table: Quantiles) -> None:
        rising = all(p < q and a <= b for (p, a), (q, b) in pairwise(table))
        if len(table) < 2 or not rising or table[0][0] != 0 or table[-1][0] != 1 or table[0][1] < 0:
            raise self._problem(name, "[[0, smallest], …, [1, largest]], both rising", list(table))

    def _problem(self, key: str, expected: str, got: object) -> ConfigError:
        text = str(got)
        return ConfigError(
            "a profile can't have this value",
            where=f"profile {self.name}: {key}",
            expected=expected,
            got=text if len(text) <= 80 else text[:77] + "...",
        )

    def faster(self, times: float) -> Profile:
        """The same in another measure of time: what took `times` seconds takes one."""
        seconds: dict[str, Any] = {name: getattr(self, name) / times for name in SECONDS}
        rates: dict[str, Any] = {name: getattr(self, name) * times for name in RATES}
        latencies = tuple((p, seconds / times) for p, seconds in self.tool_latency_quantiles)
        return replace(self, **seconds, **rates, tool_latency_quantiles=latencies)

    # ------------------------------------------------------------ generation

    def decode_step_s(self, running: int, kv_tokens: float) -> float:
        """One token for each of `running` sequences that together hold `kv_tokens`, prompts included."""
        return self.step_s + self.step_s_per_sequence * running + self.step_s_per_kv_token * kv_tokens

    def prefill_s(self, tokens: float) -> float:
        """Keys and values of so many tokens, of a prompt or of a response that goes on elsewhere."""
        return tokens / self.prefill_tokens_per_s

    def response_length(self, seed: int, group: int, index: int) -> int:
        """Tokens of a response, at least 1: the same for every attempt, wherever and whenever it is generated.

        A group's responses share a part of what decides their lengths (a Gaussian copula); the lengths of one
        response of each of many groups follow `response_quantiles`.
        """
        shared = _group_score(seed, group)
        own = _NORMAL.inv_cdf(keyed_uniform("response", seed, group, index))
        score = self.correlation**0.5 * shared + (1 - self.correlation) ** 0.5 * own
        length = round(quantile(self.response_quantiles, _NORMAL.cdf(score)))
        return min(max(1, length), self.max_response_tokens)

    def tool_latency_s(self, seed: int, group: int, index: int, call: int) -> float:
        """Seconds that call number `call` of a response takes."""
        return quantile(self.tool_latency_quantiles, keyed_uniform("tool", seed, group, index, call))

    # ------------------------------------------------------------ training and weights

    def train_step_s(self, tokens: int, mini_batches: int, gpus: int, first: bool = True) -> float:
        """One iteration on a batch of `tokens` (prompts and responses), publishing apart; or a part of one.

        Only the `first` part pays what is paid once an iteration.
        """
        fixed = self.train_s_per_iteration * first + mini_batches * self.train_s_per_mini_batch
        return fixed + tokens / (self.train_tokens_per_s_per_gpu * gpus)

    def publish_s(self) -> float:
        """How long publishing holds the trainer."""
        return self.publish_stall_s

    def broadcast_s(self, machines: int) -> float:
        """From the relay of the trainer's machine to those of `machines` machines in all; 0 if there is only one."""
        if machines <= 1:
            return 0.0
        per_gb = self.broadcast_s_per_gb + self.broadcast_s_per_gb_per_doubling * log2(machines)
        return self.weight_bytes / 1e9 * per_gb

    def load_s(self) -> float:
        """A replica loads a version that the relay of its machine holds."""
        return self.load_weights_s


SECONDS = (
    "step_s", "step_s_per_sequence", "step_s_per_kv_token", "reward_s", "train_s_per_mini_batch",
    "train_s_per_iteration", "publish_stall_s", "broadcast_s_per_gb", "broadcast_s_per_gb_per_doubling",
    "load_weights_s", "switch_s",
)  # fmt: skip
RATES = ("prefill_tokens_per_s", "train_tokens_per_s_per_gpu")
"""Fields of a profile by what they count; the others know no time, or hold quantiles of it."""


@lru_cache(maxsize=4096)
def _group_score(seed: int, group: int) -> float:
    """Normal score that the responses of a group share."""
    return _NORMAL.inv_cdf(keyed_uniform("group", seed, group))


def quantile(table: Quantiles, probability: float) -> float:
    """The value below which this share lies."""
    place = min(bisect_right(table, probability, key=lambda row: row[0]), len(table) - 1)
    (p, a), (q, b) = table[place - 1], table[place]
    return a + (b - a) * (probability - p) / (q - p)


def keyed_uniform(purpose: str, *key: int) -> float:
    """A number in (0, 1) that depends on nothing but its arguments, on any machine.

    Args:
        purpose: at most 16 ASCII characters; equal keys for different purposes give independent numbers
        key: integers of up to 64 bits
    """
    data = pack(f"<{len(key)}Q", *[part % 2**64 for part in key])
    digest = hashlib.blake2b(data, digest_size=8, person=purpose.encode()).digest()
    return ((int.from_bytes(digest, "little") >> 12) + 0.5) * 2.0**-52


# ---------------------------------------------------------------- files


def load_profile(name_or_path: str | Path) -> Profile:
    """A profile of the package by its name (`32b`), or any TOML file by its path.

    Raises ConfigError: not there, not TOML, a key that is unknown or missing, a value that means nothing.
    """
    given = Path(name_or_path)
    path = given if given.suffix == ".toml" else PROFILES / f"{name_or_path}.toml"
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in PROFILES.glob("*.toml")))
        raise ConfigError("no such profile", where=str(name_or_path), expected=f"a TOML file, or one of {names}")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("not valid TOML", where=str(path), got=str(error)) from None
    return _parse({"name": path.stem} | data, str(path))


def _parse(data: Mapping[str, Any], where: str) -> Profile:
    known = {field.name: field for field in fields(Profile)}
    for key in data:
        if key not in known:
            raise ConfigError("unknown key in a profile", where=f"{where}: {key}", expected=", ".join(known))
    for name, field in known.items():
        if name not in data and field.default is MISSING:
            raise ConfigError("missing in a profile", where=f"{where}: {name}", expected=_KINDS[str(field.type)])
    values: dict[str, Any] = {key: _value(data[key], str(known[key].type), f"{where}: {key}") for key in data}
    return Profile(**values)


_KINDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "Quantiles": "a list of [probability, value]",
}
"""Types of the fields, in words."""


def _value(value: object, kind: str, where: str) -> object:
    """The TOML value as the field's type. Raises ConfigError if it is another."""
    if kind == "str" and isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        if kind == "float":
            return float(value)
        if kind == "int" and value == int(value):
            return int(value)
    if kind == "Quantiles" and isinstance(value, list):
        with suppress(TypeError, ValueError):
            return tuple((float(probability), float(at)) for probability, at in value)
    raise ConfigError("can't have this value", where=where, expected=_KINDS[kind], got=str(value)[:80])
