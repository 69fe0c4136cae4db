"""What is simulated: settings, times, sizes, and how often things go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from laminar.timing import COALESCE_S, Profile
from laminar.types import Settings


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds that messages take, the wait for others to travel with included."""

    coalesce_s: float = COALESCE_S
    """A replica reports what has ended within this time."""
    exchange_s: float = 0.005
    """Between the data store and a replica, the scorer or the trainer, and back."""
    poll_s: float = 0.02
    """From an event in the data store to the manager, and from the manager to the data store."""
    beat_s: float = 0.005
    """Between the manager and a replica, a relay or the trainer."""
    tick_s: float = 1.0
    """Between two ticks of the manager; each carries the beats that say nothing new."""
    load_age_s: float = 0.0
    """How old the loads are that the manager goes by when a version is published."""
    news_s: float = 0.0
    """What comes for a replica that generates is heard with its next report, or within this time."""
    command_s: float = 0.0
    """A command for a replica that generates is heard within this time."""
    stream_s: float | None = None
    """How often replicas stream unfinished tokens; None: with the end of a sample, or when it is released."""
    jitter: bool = False
    """Each message takes a share of its time that is drawn; messages of one sender keep their order."""
    loss: float = 0.0
    """Share of answers that never arrive. What they answered is sent again after `retry_s`."""
    retry_s: float = 0.3


@dataclass(frozen=True, slots=True)
class Chances:
    """How often something is wrong with a sample or a prompt: probabilities, drawn by key."""

    engine_error: float = 0.0
    reward_error: float = 0.0
    zero_variance: float = 0.0
    """Of a group: all rewards equal."""
    overlong: float = 0.0
    """Of a prompt."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One simulated run."""

    settings: Settings
    profile: Profile
    seed: int = 0
    replicas: int = 1
    late_s: tuple[float, ...] = ()
    """By replica: how much later than everything else it is there; none: not at all."""
    replicas_per_machine: int = 1
    train_gpus: int = 1
    one_machine: bool = False
    """Trainer and replicas share one machine and one relay: nothing is broadcast."""
    colocated: bool = False
    """Trainer and replicas share their GPUs: each iteration switches between them, which moves the weights too."""
    kv_tokens: int | None = None
    max_num_seqs: int | None = None
    max_new_tokens: int | None = None
    """None: those of the profile."""
    prompts: int | None = None
    """Draws after which the prompt pool has ended."""
    prefetch: bool = True
    """The trainer asks for its next batch when it begins one."""
    checkpoint_every: int = 10
    spare_slots: int = 2
    newest_first: bool = False
    """The sampler offers the newest group first, which is the harder case; else the oldest."""
    delays: Delays = field(default_factory=Delays)
    chances: Chances = field(default_factory=Chances)
    restarts: tuple[float, ...] = ()
    """When everything is killed and begun again."""
    notice_s: float = 0.1
    """From a death to the manager's knowledge of it, by the driver."""
    start_s: float = 2.0
    """From the wish for a process to its first words."""

    def node(self, replica: int) -> str:
        """Machine of a replica."""
        return "node-0" if self.one_machine else f"node-{1 + replica // self.replicas_per_machine}"

    def response_length(self, group: int, index: int) -> int:
        length = self.profile.response_length(self.seed, group, index)
        return length if self.max_new_tokens is None else min(length, self.max_new_tokens)
