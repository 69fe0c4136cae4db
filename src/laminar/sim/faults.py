"""Faults by seed: a simulated run in which processes die, stop and are cut off, and what must hold all the same.

`python -m laminar.sim.faults SEED` runs one seed and prints its plan, its faults, the last events and the verdict.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from laminar.control.events import DrainRequested, ScaleRequested
from laminar.control.ledger import TERMINAL
from laminar.control.manager import Record, replay
from laminar.errors import IllegalTransition, ProtocolError, RunFailed
from laminar.sim.plan import Chances, Delays, Plan
from laminar.sim.world import World
from laminar.timing import load_profile
from laminar.types import SampleId, Settings, Version

MAX_RESTARTS = 3
ON_ITS_WAY_S = 1.0
"""Longer than a message takes, all attempts counted."""
LONGEST_RUN_S = 20_000.0
BOUNDS = {"sync": 0, "one_step": 1, "stream": 1}
ROUGH = Delays(
    coalesce_s=0.1,
    exchange_s=0.3,
    poll_s=0.3,
    beat_s=0.3,
    tick_s=1.0,
    news_s=0.5,
    command_s=0.5,
    stream_s=0.5,
    jitter=True,
    loss=0.15,
)
QUICK = Delays(coalesce_s=0.01, exchange_s=0.02, poll_s=0.02, beat_s=0.02, tick_s=0.5, stream_s=0.2, jitter=True)
SLOW_LINKS = replace(
    load_profile("toy"),
    broadcast_s_per_gb=1.0,
    broadcast_s_per_gb_per_doubling=1.0,
    train_tokens_per_s_per_gpu=20_000.0,
    train_s_per_mini_batch=0.02,
    train_s_per_iteration=0.1,
)
"""Versions are published faster than they travel, and come to one machine later than to another."""
BURST_S = 1.0
"""Sometimes everything goes wrong within this time."""
SLOW_SHARE, SLOW_STEP_S = 0.5, 0.5
"""A slow process is stopped for this share of each step."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and when: at a second of simulated time, or when so many actions have run."""

    kind: str
    """`kill`, `stall`, `partition`, `slow`, `drain` or `scale`"""
    role: str
    id: str
    at: float | None = None
    event: int | None = None
    seconds: float = 0.0
    """How long it lasts."""
    peer: str = "manager"
    """Who is out of reach: `manager` or `datastore`."""
    replicas: int = 0
    """How many are wanted from now on."""

    def is_due(self, now: float, num_events: int) -> bool:
        return now >= self.at if self.at is not None else num_events >= (self.event or 0)


@dataclass(frozen=True, slots=True)
class ChaosResult:
    seed: int
    outcome: str
    message: str
    problems: tuple[str, ...]
    """What did not hold; empty if all is well."""
    records: tuple[Record, ...]

    @property
    def command(self) -> str:
        """Runs the seed again."""
        return f"python -m laminar.sim.faults {self.seed}"


# ---------------------------------------------------------------- what is run


def plan_of(seed: int) -> Plan:
    """Everything that a seed can choose but the faults, with replacement of processes and repack on."""
    r = Random(f"plan {seed}")
    schedule = r.choice(["laminar", "laminar", "laminar", "partial", "partial", "sync", "one_step", "stream"])
    k = BOUNDS[schedule] if schedule in BOUNDS else r.choice([0, 1, 2, 4, None])
    batch, size = r.choice([1, 2, 3, 4, 6]), r.choice([1, 2, 4])
    prompts = r.choice([None, None, None, r.randint(1, 30)])
    settings = Settings(
        schedule=schedule,
        max_staleness=k,
        iterations=None if prompts and r.random() < 0.5 else r.choice([1, 3, 6, 10]),
        groups_per_batch=batch,
        group_size=size,
        min_group_size=min(2, size),
        num_mini_batches=r.choice([n for n in (1, 2, 3) if batch % n == 0]),
        max_outstanding_groups=batch * r.choice([3 if k is None else k + 1, 1]),
        groups_in_flight=r.choice([1, 2, batch]),
        last_batch=r.choice(["train", "drop"]),
        drop_zero_variance=size > 1 and r.random() < 0.3,
        eval_groups=r.choice([0, 0, 1, 3, 5]),
        eval_every=r.choice([None, 1, 2]),
        eval_before_train=r.random() < 0.5,
        eval_after_train=r.random() < 0.5,
        admission=r.choice(["batch", "fresh"]),
        repack=True,
        repack_interval_s=r.choice([0.5, 2.0]),
        move_timeout_s=r.choice([1.0, 10.0]),
        adopt_timeout_s=r.choice([0.5, 3.0, 30.0]),
        engine_retries=seed % 3,
        max_restarts=MAX_RESTARTS,
        dead_after_s=r.choice([4.0, 30.0]),
    )
    plan = Plan(
        settings,
        load_profile("toy"),
        seed,
        replicas=r.choice([1, 2, 3, 5]),
        replicas_per_machine=r.choice([1, 2]),
        one_machine=r.random() < 0.3,
        kv_tokens=r.choice([None, 400]),
        prompts=prompts,
        prefetch=r.random() < 0.5,
        checkpoint_every=r.choice([1, 2, 5]),
        spare_slots=r.choice([0, 1, 2]),
        newest_first=r.random() < 0.5,
        delays=r.choice([ROUGH, QUICK]),
        chances=Chances(
            engine_error=r.choice([0, 0, 0.1]),
            reward_error=r.choice([0, 0, 0.1]),
            zero_variance=r.choice([0, 0, 0.5]),
            overlong=r.choice([0, 0, 0.2]),
        ),
        restarts=(r.uniform(0, 20),) if r.random() < 0.15 else (),
    )
    if r.random() < 0.2:
        iterations = settings.iterations and 3 * settings.iterations
        return replace(plan, settings=replace(settings, iterations=iterations), profile=SLOW_LINKS)
    return plan


def faults_of(seed: int, plan: Plan) -> tuple[Fault, ...]:
    """What goes wrong in this seed's run."""
    r = Random(f"faults {seed}")
    favourite = _target(r, plan) if r.random() < 0.15 else None
    burst = r.uniform(0, 20) if r.random() < 0.25 else None
    faults = []
    for _ in range(r.choice([1, 2, 3, 5, 8])):
        kind = r.choice(["kill", "kill", "stall", "stall", "partition", "slow", "drain", "scale"])
        role, id_ = favourite or _target(r, plan)
        wanted = r.randint(1, plan.replicas + 2)
        if kind == "drain":
            role, id_ = "replica", f"replica-{r.randrange(plan.replicas)}"
        elif kind == "scale":
            role, id_ = "replica", "*"
        timed = burst is not None or r.random() < 0.5
        at = r.uniform(0, 25) if burst is None else burst + r.uniform(0, BURST_S)
        faults.append(
            Fault(
                kind,
                role,
                id_,
                at=at if timed else None,
                event=None if timed else r.randint(1, 1500),
                seconds=r.choice([0.3, 1.0, 3.0, 8.0, 40.0]),
                peer=r.choice(["manager", "datastore"]),
                replicas=wanted,
            )
        )
    if r.random() < 0.2:
        faults += _falls_behind(r, plan)
    return tuple(faults)


def _falls_behind(r: Random, plan: Plan) -> list[Fault]:
    """One machine gets no new versions, and those who have them die."""
    at, machine = r.uniform(1, 12), plan.node(r.randrange(plan.replicas))
    behind = Fault("partition", "relay", machine.replace("node", "relay"), at=at, seconds=40.0)
    others = [f"replica-{i}" for i in range(plan.replicas) if plan.node(i) != machine]
    return [behind, *(Fault("kill", "replica", id_, at=at + r.uniform(0, 8)) for id_ in others)]


def _target(r: Random, plan: Plan) -> tuple[str, str]:
    machines = sorted({"node-0", *(plan.node(i) for i in range(plan.replicas))})
    role = r.choice(["replica", "replica", "replica", "relay", "trainer", "manager", "datastore", "scorer"])
    match role:
        case "replica":
            return role, f"replica-{r.randrange(plan.replicas)}"
        case "relay":
            return role, r.choice(machines).replace("node", "relay")
    return role, role


def strike(world: World, fault: Fault) -> None:
    """Let it happen. Who is not there is not hit."""
    life = world.life(fault.role, fault.id)
    match fault.kind:
        case "kill":
            world.driver.kill(fault.role, fault.id)
        case "drain":
            world.driver.tell(DrainRequested(fault.id))
        case "scale":
            world.driver.tell(ScaleRequested(fault.replicas))
        case "stall" if life is not None:
            life.stall(fault.seconds)
        case "partition" if life is not None:
            for link in life.links_with(fault.peer):
                link.hold(world.kernel.now + fault.seconds)
        case "slow" if life is not None:
            for step in range(int(fault.seconds / SLOW_STEP_S)):
                # by the clock, not by its own time: two such faults must not stop it in turns, without a moment to live
                world.kernel.after(step * SLOW_STEP_S, lambda: life.stall(SLOW_STEP_S * SLOW_SHARE))


def run_chaos(seed: int) -> ChaosResult:
    """Run the plan of a seed with its faults, and say what did not hold."""
    plan = plan_of(seed)
    return run_faults(plan, faults_of(seed, plan))


def run_faults(plan: Plan, faults: tuple[Fault, ...]) -> ChaosResult:
    """Run a plan in which `faults` happen, and say what did not hold."""
    world = World(plan, record=True)
    watch = Watch(world)
    world.after_commit.append(watch.look)
    left = list(faults)
    outcome = message = "none"
    problems: list[str] = []
    try:
        while not world.over and world.kernel.now < LONGEST_RUN_S:
            for fault in [f for f in left if f.is_due(world.kernel.now, world.kernel.num_events)]:
                left.remove(fault)
                if world.end is None:
                    watch.hit(fault)
                    strike(world, fault)
            world.kernel.step()
    except (ProtocolError, IllegalTransition, RunFailed) as error:
        problems.append(f"{type(error).__name__}: {error}")
    else:
        if world.end is not None:
            outcome, message = world.end.outcome, world.end.message
        problems += [*watch.deaths(), *_verdict(world, outcome, message)]
    return ChaosResult(plan.seed, outcome, message, (*watch.problems, *problems), tuple(world.records or ()))


# ---------------------------------------------------------------- what must hold


class Watch:
    """What must hold after every transaction of the data store."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._newest: dict[tuple[SampleId, int], Version] = {}
        self._hit: set[tuple[str, str]] = set()
        """Processes that something has happened to."""
        self._all_hit = False
        self.problems: list[str] = []

    def hit(self, fault: Fault) -> None:
        self._hit.add((fault.role, fault.id))
        self._all_hit = self._all_hit or (fault.kind == "partition" and fault.role == "manager")

    def deaths(self) -> Iterator[str]:
        """Who was taken for dead without a cause, the manager's own absence included."""
        for p in self._world.driver.seen():
            if p.deaths and (p.role, p.id) not in self._hit and not self._all_hit:
                yield f"{p.role} {p.id} was replaced, and nothing had happened to it"

    def look(self) -> None:
        store, settings = self._world.store, self._world.settings
        if sum(g.kind == "train" for g in store.groups.values()) != store.accounts.cursor and not self.problems:
            self.problems.append("the ledger is open: not every prompt that was drawn has a group")
        self._look_at_relays()
        self._look_at_places()
        for s in (s for group in store.accounts.groups.values() for s in group.samples):
            one = settings.schedule != "partial" or store.accounts.groups[s.id.group].kind == "eval"
            if one and s.last_version != s.version:
                self.problems.append(f"{s.id} has tokens of {s.last_version} and is of {s.version}")
            if s.version.number < store.accounts.groups[s.id.group].version.number:
                self.problems.append(f"{s.id} began anew under {s.version}, which is older than its group")
            if s.last_version < self._newest.setdefault((s.id, s.attempt), s.last_version):
                self.problems.append(f"{s.id} went back to {s.last_version}")
            self._newest[s.id, s.attempt] = s.last_version

    def _look_at_places(self) -> None:
        """Quota and staleness rule: there are places left for all live groups, up to the deadline of each."""
        accounts, settings = self._world.store.accounts, self._world.settings
        if accounts.num_live > settings.max_outstanding_groups:
            self.problems.append(f"{accounts.num_live} groups are live, the quota is {settings.max_outstanding_groups}")
        if accounts.ahead:
            return  # batches after u have places taken
        due = sorted(g.deadline for g in accounts.live() if g.deadline is not None)
        for number, deadline in enumerate(due, start=1):
            if number > (deadline + 1) * settings.groups_per_batch - accounts.cut_groups:
                self.problems.append(f"{number} groups are due by batch {deadline}, which is too many")

    def _look_at_relays(self) -> None:
        """Within the time of two broadcasts a machine has what was published, or something newer."""
        world = self._world
        if world.plan.restarts or ("trainer", "trainer") in self._hit:
            return
        for relay in world.relays.values():
            latest = world.kernel.now - 2 * relay.broadcast_s - ON_ITS_WAY_S
            due = max((m.version for m in world.marks if relay.began <= m.time < latest), default=None)
            newest = max((v.number for v in relay.whole), default=-1)
            if due is not None and newest < due and ("relay", relay.id) not in self._hit:
                self.problems.append(f"{relay.id} still has version {newest}, {due} was published long ago")


def _verdict(world: World, outcome: str, message: str) -> Iterator[str]:
    """What does not hold of a run that is over."""
    settings, store = world.settings, world.store
    if outcome == "failed":
        if max(len(p.deaths) for p in world.driver.seen()) <= settings.max_restarts:
            yield f"failed though nobody was out of restarts: {message}"
        if not message:
            yield "failed without a message"
    elif outcome != "completed":
        yield f"not over after {world.kernel.now:g} s"
    train = [g for g in store.groups.values() if g.kind == "train"]
    open_ = [g.id for g in store.groups.values() if g.state not in TERMINAL]
    if sorted(open_) != sorted(store.accounts.groups):
        yield f"groups that are neither in flight nor over: {open_}"
    if outcome == "completed":
        if open_ or store.accounts.cuts or store.accounts.moves:
            yield f"left over: groups {open_}, cuts {list(store.accounts.cuts)}, moves {list(store.accounts.moves)}"
        samples = sum(s.state not in TERMINAL for g in store.groups.values() for s in g.samples)
        if samples:
            yield f"{samples} samples are neither trained nor dropped"
        if not store.accounts.exhausted and len(store.iterations) != settings.iterations:
            yield f"{len(store.iterations)} iterations instead of {settings.iterations}"
    if sorted(g.cursor for g in train) != list(range(store.accounts.cursor)):
        yield "prompts were drawn twice or lost"
    cut = [g for c in store.cuts.values() for g in c.groups]
    if len(cut) != len(set(cut)):
        yield "a group is in two cuts"
    updates = [i.update for i in store.iterations]
    if len(updates) != len(set(updates)):
        yield f"a batch was trained twice: {updates}"
    trained = sorted(g for (u, _), c in store.cuts.items() if u in updates for g in c.groups)
    if trained != sorted(g.id for g in train if g.state == "trained"):
        yield "what was trained is not what was cut"
    oldest = max((age for i in store.iterations for age in i.staleness_use), default=0)
    if settings.max_staleness is not None and oldest > settings.max_staleness:
        yield f"trained at staleness {oldest}, {settings.max_staleness} is the bound"
    if next(replay(settings, world.records or ()), None) is not None:
        yield "a replay of the events gives other commands"


def main(seed: int) -> int:
    """Print what a seed does. 1 if something does not hold."""
    plan = plan_of(seed)
    print(plan)
    for fault in faults_of(seed, plan):
        print(fault)
    result = run_chaos(seed)
    for record in result.records[-30:]:
        print(f"{record.now:9.3f} {record.event}")
        for command in record.commands:
            print(f"{'':9} -> {command}")
    print(f"{result.outcome}: {result.message}")
    for problem in result.problems:
        print(f"does not hold: {problem}")
    return int(bool(result.problems))


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))
