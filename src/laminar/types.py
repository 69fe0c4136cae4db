"""Words and messages that every part of Laminar shares.

Everything here is plain data without behaviour. Arrays travel as `bytes`, so that this module, and
`control/` above it, need no numpy: token ids and versions are little-endian int32, log-probs float32,
loss masks uint8, rewards float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Version(NamedTuple):
    """Identity of one set of weights. Ordered: a higher lineage is newer whatever its number."""

    lineage: int
    number: int
    """Completed training iterations; 0 = the initial weights."""

    def __str__(self) -> str:
        return str(self.number) if self.lineage == 0 else f"{self.number}@{self.lineage}"


class SampleId(NamedTuple):
    """One response of a group. Stable over retries; `attempt` counts restarts from the prompt."""

    group: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls on an id


ROLES = ("replica", "trainer", "relay", "scorer", "datastore", "manager")
"""Of the processes that may die and be replaced."""

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
"""Environment of every process that computes: large logits must not be paged in anew by every operation."""

TRAINER_SLOTS = 4
"""Weight slots of a machine that readers must leave: being written, newest, being checked, being sent."""


@dataclass(frozen=True, slots=True)
class SlotRef:
    """Where a whole, verified set of weights lies on this machine."""

    path: str
    """A file in safetensors layout with unfused Hugging Face names."""
    version: Version
    fingerprint: str
    """xxh3 over the digests of all tensors, hexadecimal."""
    dtype: str
    """`fp32` or `bf16`."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request is decoded."""

    temperature: float = 1.0
    """0 = greedy (evaluation only)."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 mean off."""
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    """Stop strings. The ids that spell one are kept; the text handed to the reward is cut."""


# ---------------------------------------------------------------- replica <-> data store


@dataclass(frozen=True, slots=True)
class Work:
    """One trajectory for a replica to generate or to go on with."""

    sample: SampleId
    attempt: int
    owner_epoch: int
    version: Version
    kind: str
    """`train` or `eval`: selects the sampling parameters."""
    prompt: bytes
    """int32 [P]"""
    response: bytes = b""
    """int32 [R]: tokens already generated, by an earlier owner."""
    logprobs: bytes = b""
    """float32 [R]"""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one trajectory, all of one version, starting at response offset `start`."""

    sample: SampleId
    owner_epoch: int
    start: int
    version: Version
    tokens: bytes
    """int32 [T]"""
    logprobs: bytes
    """float32 [T], of the behaviour policy"""
    mask: bytes
    """uint8 [T], 1 where the token is trained on"""


@dataclass(frozen=True, slots=True)
class Finish:
    """A trajectory that ended by itself. `length` is the whole response."""

    sample: SampleId
    owner_epoch: int
    length: int
    reason: str
    """`stop` or `length`"""


@dataclass(frozen=True, slots=True)
class Failure:
    """A trajectory that its owner could not finish: it begins anew with another attempt, or is dropped."""

    sample: SampleId
    owner_epoch: int
    reason: str
    """A drop reason, e.g. `engine_error`"""
    message: str


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica tells the data store in one exchange; a repeat of `sequence` is answered alike."""

    replica: str
    incarnation: int
    sequence: int
    chunks: tuple[Chunk, ...] = ()
    finished: tuple[Finish, ...] = ()
    failed: tuple[Failure, ...] = ()
    released: tuple[tuple[SampleId, int], ...] = ()
    """(sample, owner epoch) that this replica has let go of; all that it made of them is in `chunks`, now or before."""
    accepted: tuple[tuple[SampleId, int], ...] = ()
    """(sample, owner epoch) of the work that arrived: it is not sent again."""
    busy_s: float = 0.0
    """Seconds spent generating since this incarnation began."""
    wait_s: float = 0.0
    """How long the answer may be held back while there is nothing to say (an idle replica)."""


@dataclass(frozen=True, slots=True)
class ReplicaReply:
    """Answer to a report: everything in it is durable; here is what to do next."""

    sequence: int
    work: tuple[Work, ...] = ()
    release: tuple[tuple[SampleId, int], ...] = ()
    """(sample, owner epoch) to flush and let go of: another replica goes on with them."""
    cancel: tuple[tuple[SampleId, int], ...] = ()
    """(sample, owner epoch) that this replica owns no longer: forget them, report nothing more."""


# ---------------------------------------------------------------- scorer <-> data store


@dataclass(frozen=True, slots=True)
class UnscoredMember:
    index: int
    attempt: int
    version: int
    finish_reason: str
    tokens: bytes
    """int32 [R], EOS included"""


@dataclass(frozen=True, slots=True)
class UnscoredGroup:
    """A group with every member finished or dropped, to be scored in one call."""

    group: int
    kind: str
    row: str
    """The dataset row as JSON, prompt column included."""
    prompt: bytes
    """int32 [P]"""
    members: tuple[UnscoredMember, ...]


@dataclass(frozen=True, slots=True)
class MemberScore:
    """`reward` is None when every function said None. A failed member has `failure`, and the reward of
    `reward.on_failure` if that is one."""

    index: int
    attempt: int
    reward: float | None
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Per function, unweighted."""
    completion: str = ""
    failure: str | None = None
    """Drop reason, e.g. `reward_error`, `reward_timeout`"""
    message: str = ""


@dataclass(frozen=True, slots=True)
class GroupScore:
    group: int
    members: tuple[MemberScore, ...]
    prompt_text: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the functions logged with `log_metric`."""


@dataclass(frozen=True, slots=True)
class ScoreReport:
    """Scores to record (first score of an attempt wins), and how many groups are wanted."""

    incarnation: int
    scores: tuple[GroupScore, ...] = ()
    want: int = 0
    fatal: str | None = None
    """Set when the failure policy says that the run must stop: the message for the user."""


# ---------------------------------------------------------------- trainer <-> data store


@dataclass(frozen=True, slots=True)
class BatchChunk:
    """Run of tokens of one version inside a batch's response tokens."""

    version: Version
    length: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A cut, or one part of it, as flat arrays in the canonical order (group, index).

    N samples; P_i and R_i prompt and response lengths.
    """

    update: int
    """u: the version after it is u + 1."""
    part: int
    num_parts: int
    ids: tuple[tuple[int, int, int], ...]
    """[N] (group, index, attempt)"""
    versions: tuple[Version, ...]
    """[N]: version at issue (of the current attempt)"""
    prompt_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]
    prompt_tokens: bytes
    """int32 [sum P_i]"""
    response_tokens: bytes
    """int32 [sum R_i]"""
    logprobs: bytes
    """float32 [sum R_i], behaviour policy"""
    mask: bytes
    """uint8 [sum R_i]"""
    chunks: tuple[tuple[BatchChunk, ...], ...]
    """[N] runs of tokens by version; one run but under `partial`."""
    rewards: tuple[float, ...]
    """[N] weighted sums"""
    truncated: tuple[bool, ...]
    """[N]: ended by length"""


Statistics = dict[str, float | None]
"""Metric rows by the names of docs/metrics.md; None is null."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The trainer's word that cut `update` is in version update + 1, with its statistics."""

    update: int
    version: Version
    checkpoint: int
    """Number of the newest durable checkpoint (= version it holds)."""
    statistics: Statistics = field(default_factory=dict)


# ---------------------------------------------------------------- control


@dataclass(frozen=True, slots=True)
class Settings:
    """All that decisions depend on, resolved: no defaults are left to derive."""

    schedule: str
    max_staleness: int | None
    """k; None = no bound"""
    iterations: int | None
    groups_per_batch: int
    """B"""
    group_size: int
    min_group_size: int
    num_mini_batches: int
    max_outstanding_groups: int
    """quota on live groups"""
    groups_in_flight: int
    """whole groups that a replica takes at a time"""
    last_batch: str = "train"
    drop_zero_variance: bool = False
    engine_retries: int = 0
    """Attempts after the first that a sample has before an engine error drops it"""
    eval_groups: int = 0
    """size of one evaluation, in groups; 0 = no evaluation"""
    eval_every: int | None = None
    eval_before_train: bool = False
    eval_after_train: bool = False
    eval_group_size: int = 1
    admission: str = "batch"
    repack: bool = False
    repack_interval_s: float = 5.0
    repack_kv_fraction: float = 0.9
    repack_max_requests: int = 2**31 - 1
    prefill_tok_s: float | None = None
    """Speed at which a moved trajectory is prefilled again; None = free"""
    move_timeout_s: float = 10.0
    adopt_timeout_s: float = 30.0
    """How long orphans wait for a replica with their version before they begin anew"""
    max_restarts: int = 0
    """Replacements of one process before it is given up; 0 = a death ends the run"""
    suspect_after_s: float = 2.0
    dead_after_s: float = 30.0
    start_timeout_s: float = 300.0
    """Silence of a process that starts, after which it counts as dead"""
    drain_timeout_s: float = 30.0
    """A replica that is to leave goes after this long, whatever it still holds"""
    stall_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica's engine holds at this moment."""

    kv_used: int = 0
    """tokens"""
    kv_capacity: int = 0
    """tokens"""
    num_running: int = 0
    num_waiting: int = 0
