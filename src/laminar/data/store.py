"""The data store: prompt pool, partial pool and buffer of a run, in one SQLite file.

Owns: the database, the account of all samples (`control.accounts`), the prompt cursor, metrics.jsonl and eval.jsonl.
Consumes: reports of replicas, scores, the trainer's requests, the manager's commands. One call is one transaction:
when it returns, what it was told is durable. All calls come from one thread; nothing here waits, callers try again
when `changes` has moved.
Invariants: a group is in at most one cut; a cut is for ever; tokens are appended by the current owner only, without
gaps.
"""

from __future__ import annotations

import json
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Protocol

from laminar.control import codec
from laminar.control.accounts import Accounts, Cut, Group, Order, Sample
from laminar.control.commands import (
    Adopt,
    CancelMove,
    Command,
    Complete,
    GiveUpCut,
    GiveUpEval,
    Issue,
    Move,
    NoteDeaths,
    Numbered,
    Orphan,
    Restart,
)
from laminar.control.events import CutTrained, EvalDone, Fatal, Recovered, StoreEvent, StoreEvents
from laminar.control.ledger import TERMINAL
from laminar.control.mailbox import Inbox
from laminar.data import schema
from laminar.data.batches import read_batch
from laminar.data.metrics import RowFile, iteration_row, stored_rows
from laminar.data.prompts import Drawn
from laminar.errors import DataError, ProtocolError, StorageError
from laminar.types import (
    ROLES,
    Batch,
    GroupScore,
    ReplicaReply,
    ReplicaReport,
    SampleId,
    ScoreReport,
    Settings,
    Trained,
    UnscoredGroup,
    UnscoredMember,
    Version,
    Work,
)

FREED_AT_ONCE = 16
"""Groups whose tokens are deleted in one transaction: those of ten large batches in one would take seconds."""
KEPT_TEXTS = 1000
"""Groups whose prompt and completion text stays after training."""


class Prompts(Protocol):
    """The prompt pool, as `laminar.data.prompts.PromptSource` is one: a pure function of the number of the draw."""

    def __len__(self) -> int: ...
    def exhausted(self, cursor: int) -> bool: ...
    def draw(self, cursor: int) -> Drawn: ...
    def take(self, row_index: int, epoch: int = 0) -> Drawn: ...


class DataStore:
    """See the module's contract. `folder` is the run folder, `clock` gives run seconds."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        prompts: Prompts,
        eval_prompts: Prompts | None,
        order: Order,
        clock: Callable[[], float],
        anew: bool = True,
    ) -> None:
        """`anew`: everybody else starts too, so nobody owns anything; else only this process has been replaced."""
        self.settings, self.prompts, self.eval_prompts = settings, prompts, eval_prompts
        self.order, self.clock = order, clock
        self.changes = 0
        """Transactions so far: who waits for something looks again when this has moved."""
        self.db = schema.connect(folder / "data.sqlite")
        self.accounts: Accounts = schema.load_accounts(self.db, settings)
        self.metrics = RowFile(folder / "metrics.jsonl", stored_rows(self.db, "metrics"))
        self.evals = RowFile(folder / "eval.jsonl", stored_rows(self.db, "evals"))
        self.refused = 0
        """Reports from owners that were none any more."""
        self._mailbox: dict[str, list[SampleId]] = {}
        self._cancel: dict[tuple[str, int], dict[tuple[SampleId, int], None]] = {}
        self._handed: tuple[int, set[int]] = (0, set())
        self._freed_batches = self._freed_texts = 0
        """Below these, rows have been freed since this start, or are going to be: those of `_to_free`."""
        self._to_free: deque[int] = deque()
        """Groups that no trainer will ask for again."""
        self._failure: BaseException | None = None
        """What broke a transaction off: the account is ahead of the database then, and nothing more is done."""
        self._busy_s: dict[tuple[str, int], float] = {}
        self._last_row = clock(), 0.0
        """Time and busy seconds of all replicas at the last metrics row."""
        self._counted = {
            name: sum(row.get(name, 0) for row in stored_rows(self.db, "metrics")) for name in self._counters()
        }
        """What all metrics rows so far say of the counters."""
        for sample in self.accounts.unfinished():
            if sample.state == "issued" and sample.owner is not None:
                self._post(sample.owner, [sample])
        if anew:
            with self._transaction():
                schema.set_meta(self.db, "starts", int(schema.get_meta(self.db, "starts", "0")) + 1)
                self.accounts.abandon()
                self.accounts.begin_term(self.term + 1)
                # a manager begins with `recovered`; what was said before it is part of that
                self.accounts.events.clear()
                self.db.execute("DELETE FROM outbox")
                schema.save_counters(self.db, self.accounts)

    @property
    def term(self) -> int:
        """Of the manager that is obeyed."""
        return self.accounts.inbox.term

    def begin_term(self) -> Recovered:
        """From here on another manager is obeyed. Returns what it begins with: all events so far are part of that."""
        with self._transaction():
            self.accounts.begin_term(self.term + 1)
            schema.save_counters(self.db, self.accounts)
        return self.recovered()

    def recovered(self) -> Recovered:
        """The counts with which the manager of this term begins."""
        done = self.db.execute("SELECT lineage, version FROM evals")
        return self.accounts.recovered(tuple(Version(*row) for row in done), self._last_event())

    # ------------------------------------------------------------ replicas

    def exchange(self, report: ReplicaReport) -> ReplicaReply:
        """Take in what a replica has made; answer with its work and with what it should forget. Repeats are no-ops."""
        key = report.replica, report.incarnation
        if report.chunks or report.finished or report.failed or report.accepted or report.released:
            with self._transaction():
                for sample, epoch in report.accepted:
                    self.accounts.accept(sample, epoch)
                for chunk in report.chunks:
                    new = self.accounts.append(
                        chunk.sample, chunk.owner_epoch, chunk.start, len(chunk.mask), chunk.version
                    )
                    if new is None:
                        self._refuse(key, chunk.sample, chunk.owner_epoch)
                    elif new:
                        self.db.execute(
                            "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                            (*chunk.sample, chunk.start, *chunk.version, chunk.tokens, chunk.logprobs, chunk.mask),
                        )
                for end in report.finished:
                    self.accounts.finish(end.sample, end.owner_epoch, end.length, end.reason)
                for failure in report.failed:
                    if self.accounts.fail(failure.sample, failure.owner_epoch, failure.reason):
                        self.db.execute("DELETE FROM chunks WHERE group_id = ? AND idx = ?", failure.sample)
                for sample, epoch in report.released:
                    if (moved := self.accounts.release(sample, epoch)) is not None and moved.owner is not None:
                        self._post(moved.owner, [moved])
        self._busy_s[key] = report.busy_s
        release = tuple(self.accounts.to_release(*key))
        return ReplicaReply(report.sequence, self._work(*key), release, tuple(self._cancel.pop(key, ())))

    def owes(self, replica: str, incarnation: int) -> bool:
        """Whether `exchange` may have something to say to it."""
        waiting = bool(self._mailbox.get(replica))
        return waiting or (replica, incarnation) in self._cancel or replica in self.accounts.moves

    def _refuse(self, key: tuple[str, int], sample: SampleId, epoch: int) -> None:
        self.refused += 1
        self._cancel.setdefault(key, {})[sample, epoch] = None

    def _work(self, replica: str, incarnation: int) -> tuple[Work, ...]:
        """What was issued to this incarnation and has not been accepted, in the order of issue."""
        waiting = []
        work = []
        for sample_id in self._mailbox.get(replica, ()):
            s = self.accounts.sample(sample_id)
            if s is None or s.state != "issued" or s.owner != replica or s.incarnation != incarnation:
                continue
            waiting.append(sample_id)
            group = self.accounts.groups[sample_id.group]
            (prompt,) = self.db.execute("SELECT prompt FROM groups WHERE id = ?", (group.id,)).fetchone()
            prefix = self._stored_tokens(s) if s.length else (b"", b"")
            work.append(Work(s.id, s.attempt, s.owner_epoch, s.version, group.kind, prompt, *prefix))
        self._mailbox[replica] = waiting
        return tuple(work)

    def _stored_tokens(self, sample: Sample) -> tuple[bytes, bytes]:
        """Tokens and log-probs of an unfinished response, as far as earlier owners streamed them."""
        rows = self.db.execute(
            "SELECT tokens, logprobs FROM chunks WHERE group_id = ? AND idx = ? ORDER BY start", sample.id
        ).fetchall()
        return b"".join(tokens for tokens, _ in rows), b"".join(logprobs for _, logprobs in rows)

    # ------------------------------------------------------------ manager

    @property
    def acked(self) -> Inbox:
        """Which commands have been carried out."""
        return self.accounts.inbox

    def obey(self, sent: Sequence[Numbered]) -> list[Command]:
        """Carry out the commands that are new, each asked again of the rules here, where the truth is. Returns them.

        What has been carried out is noted in the same transaction.
        """
        if not sent:
            return []
        with self._transaction():
            new = self.accounts.inbox.take(sent)
            for command in new:
                self._apply(command)
            schema.save_counters(self.db, self.accounts)
        return new

    def _apply(self, command: Command) -> None:
        match command:
            case Issue(kind="eval"):
                self._issue_eval(command)
            case Issue():
                self._issue(command)
            case Restart():
                self._restart(command)
            case Adopt():
                self._adopt(command)
            case Move(source, source_incarnation, destination, incarnation, version):
                self.accounts.move(source, source_incarnation, destination, incarnation, version)
            case CancelMove(source):
                self.accounts.cancel_move(source)
            case Orphan(replica, incarnation):
                self.accounts.orphan_all(replica, incarnation)
            case GiveUpEval(version=version):
                self._give_up_eval(version)
            case GiveUpCut(update):
                if self.accounts.give_up_cut(update):
                    self.db.execute("DELETE FROM cuts WHERE batch = ?", (update,))
            case NoteDeaths(deaths):
                self.accounts.note_deaths(deaths)
            case Complete():
                self.accounts.complete()
                self.db.execute("DELETE FROM cuts WHERE NOT trained")

    def events(self, after: int) -> StoreEvents:
        """Outbox rows with numbers above `after`; those up to `after` have been seen and are deleted."""
        try:
            self.db.execute("DELETE FROM outbox WHERE id <= ?", (after,))
        except sqlite3.OperationalError as error:
            raise _unwritable(error) from error
        rows = self.db.execute("SELECT id, event FROM outbox ORDER BY id").fetchall()
        return StoreEvents(rows[-1][0] if rows else after, tuple(codec.decode(json.loads(event)) for _, event in rows))

    def _issue(self, command: Issue) -> None:
        accounts = self.accounts
        groups: list[Group] = []
        overlong = 0
        while len(groups) < command.num_groups and accounts.room(command.version):
            if self.prompts.exhausted(accounts.cursor):
                accounts.exhaust()
                break
            drawn = self.prompts.draw(accounts.cursor)
            group = accounts.issue(command.replica, command.incarnation, command.version)
            self._save_prompt(group, drawn)
            if drawn.overlong:
                accounts.drop_group(group, "prompt_overlong")
                overlong += 1
                if overlong > len(self.prompts):
                    raise DataError("every prompt is longer than the limit", fix="raise `data.max_prompt_tokens`")
            else:
                groups.append(group)
                self._post(command.replica, group.samples)
        accounts.report_issued(command.replica, command.incarnation, command.version, groups, "train")

    def _issue_eval(self, command: Issue) -> None:
        assert self.eval_prompts is not None
        accounts = self.accounts
        groups = accounts.issue_eval(command.replica, command.incarnation, command.version, command.num_groups)
        accounts.report_issued(command.replica, command.incarnation, command.version, groups, "eval")
        for group in groups:
            drawn = self.eval_prompts.take(group.cursor)
            self._save_prompt(group, drawn)
            if drawn.overlong:
                accounts.drop_group(group, "prompt_overlong")
            else:
                self._post(command.replica, group.samples)

    def _save_prompt(self, group: Group, drawn: Drawn) -> None:
        schema.save_groups(self.db, [group])
        prompt = b"" if drawn.prompt_ids is None else drawn.prompt_ids.tobytes()
        self.db.execute(
            "UPDATE groups SET data = ?, prompt = ?, prompt_tokens = ? WHERE id = ?",
            (drawn.row_json, prompt, len(prompt) // 4, group.id),
        )

    def _restart(self, command: Restart) -> None:
        restarted = self.accounts.restart(command.replica, command.incarnation, command.version, command.samples)
        self.db.executemany("DELETE FROM chunks WHERE group_id = ? AND idx = ?", [s.id for s in restarted])
        self._post(command.replica, restarted)

    def _adopt(self, command: Adopt) -> None:
        self._post(
            command.replica,
            self.accounts.adopt(command.replica, command.incarnation, command.version, command.samples),
        )

    def _post(self, replica: str, samples: Sequence[Sample]) -> None:
        self._mailbox.setdefault(replica, []).extend(s.id for s in samples)

    def _give_up_eval(self, version: Version) -> None:
        for group in list(self.accounts.groups.values()):
            if group.kind == "eval" and group.version == version:
                self.accounts.drop_group(group, "version_gone")

    # ------------------------------------------------------------ scorer

    def exchange_scores(self, report: ScoreReport) -> list[UnscoredGroup]:
        """Record scores (the first of an attempt wins) and hand out up to `want` finished groups not handed out yet.

        A new incarnation of the scorer is handed everything again.
        """
        if report.incarnation != self._handed[0]:
            self._handed = report.incarnation, set()
        handed = self._handed[1]
        if report.scores or report.fatal is not None:
            with self._transaction():
                for score in report.scores:
                    self._record_score(score)
                if report.fatal is not None:
                    self.accounts.events.append(Fatal(report.fatal))
        groups: list[UnscoredGroup] = []
        for group in self.accounts.unscored():
            if len(groups) >= report.want:
                break
            if group.id not in handed:
                handed.add(group.id)
                groups.append(self._unscored(group))
        return groups

    def _record_score(self, score: GroupScore) -> None:
        self.db.execute(
            "UPDATE groups SET prompt_text = ?, logged = ? WHERE id = ?",
            (score.prompt_text, json.dumps(score.metrics), score.group),
        )
        for member in score.members:
            sample = SampleId(score.group, member.index)
            if self.accounts.score(sample, member.attempt, member.reward, member.failure):
                self.db.execute(
                    "UPDATE samples SET rewards = ?, completion = ? WHERE group_id = ? AND idx = ?",
                    (json.dumps(member.rewards), member.completion, *sample),
                )

    def _unscored(self, group: Group) -> UnscoredGroup:
        row, prompt = self.db.execute("SELECT data, prompt FROM groups WHERE id = ?", (group.id,)).fetchone()
        members = []
        for s in group.members("finished"):
            chunks = self.db.execute("SELECT tokens FROM chunks WHERE group_id = ? AND idx = ? ORDER BY start", s.id)
            tokens = b"".join(t for (t,) in chunks)
            members.append(UnscoredMember(s.id.index, s.attempt, s.version.number, s.finish_reason or "", tokens))
        return UnscoredGroup(group.id, group.kind, row, prompt, tuple(members))

    # ------------------------------------------------------------ trainer

    def next_batch(self, update: int, part: int = 0) -> Batch | None:
        """This part of cut `update`, made now if the rules allow it, the same ever after.

        None: not yet (or, if `over`, never).

        Raises ProtocolError for a batch beyond the cuts, or one that a reported checkpoint holds.
        """
        cut = self._standing_cut(update, part)
        if cut is None and update > self.accounts.update:
            raise ProtocolError(f"batch {update} was asked for, but {self.accounts.update} is the next to be cut")
        due = (update, part) == (self.accounts.update, self.accounts.part) and self.accounts.might_cut
        if cut is None and due:
            with self._transaction(durable=True):
                cut = self.accounts.cut_next(self.order)
                if cut is not None:
                    self.db.execute(
                        "INSERT INTO cuts VALUES (?, ?, ?, ?, 0)",
                        (cut.update, cut.part, cut.num_parts, json.dumps(cut.groups)),
                    )
        return None if cut is None else read_batch(self.db, cut)

    def over(self, update: int) -> bool:
        """Batch `update` will never be cut."""
        return update >= self.accounts.update and self.accounts.over

    def _standing_cut(self, update: int, part: int) -> Cut | None:
        row = self.db.execute(
            "SELECT num_parts, groups FROM cuts WHERE batch = ? AND part = ?", (update, part)
        ).fetchone()
        return None if row is None else Cut(update, part, row[0], tuple(json.loads(row[1])))

    def trained(self, trained: Trained) -> None:
        """Cut `trained.update` is in the weights: move its groups, write the metrics row. A repeat only frees rows."""
        row = None
        with self._transaction():
            groups = self.accounts.train(trained.update)
            if groups is not None:
                self.db.execute("UPDATE cuts SET trained = 1 WHERE batch = ?", (trained.update,))
                row = self._metrics_row(groups, trained)
                self.db.execute("INSERT INTO metrics VALUES (?, ?)", (row["version"], json.dumps(row)))
                schema.set_meta(self.db, "time_s", row["time_s"])
                self.accounts.events.append(CutTrained(trained.update))
            else:
                schema.set_meta(self.db, "replayed_cuts", int(schema.get_meta(self.db, "replayed_cuts", "0")) + 1)
            self._free_rows(trained)
        if row is not None:
            self.metrics.append(row)

    def _metrics_row(self, groups: Sequence[Group], trained: Trained) -> dict[str, object]:
        now, busy_s, counters = self.clock(), sum(self._busy_s.values()), self._counters()
        last, last_busy_s = self._last_row
        counted, self._counted, self._last_row = self._counted, counters, (now, busy_s)
        elapsed = max(now - last, 1e-9)
        marks = ", ".join("?" * len(groups))
        ids = [g.id for g in groups]
        rewards = [
            json.loads(text or "{}")
            for (text,) in self.db.execute(
                f"SELECT rewards FROM samples WHERE group_id IN ({marks}) AND state = 'scored'", ids
            )
        ]
        (num_tokens,) = self.db.execute(
            "SELECT COALESCE(SUM(s.length + g.prompt_tokens), 0) FROM samples s JOIN groups g ON g.id = s.group_id "
            f"WHERE g.id IN ({marks}) AND s.state = 'scored'",
            ids,
        ).fetchone()
        logged = [
            json.loads(text or "{}")
            for (text,) in self.db.execute(f"SELECT logged FROM groups WHERE id IN ({marks})", ids)
        ]
        row = iteration_row(groups, trained.update, num_tokens, rewards, logged)
        replicas = max(1, len(self._busy_s))
        return (
            {"version": trained.version.number, "time_s": now, "iteration_s": elapsed}
            | row
            | {
                "samples_per_s": row["num_samples"] / elapsed,
                "tokens_per_s": num_tokens / elapsed,
                "rollout_busy_fraction": min(1.0, max(0.0, busy_s - last_busy_s) / elapsed / replicas),
            }
            | {name: number - counted[name] for name, number in counters.items()}
            | trained.statistics
        )

    def _counters(self) -> dict[str, int]:
        """What a metrics row counts since the row before."""
        accounts = self.accounts
        deaths = accounts.all_deaths()
        return {
            "num_dropped": accounts.dropped.total(),
            "num_moved": accounts.num_moved,
            "num_adopted": accounts.num_adopted,
            "num_restarted": accounts.num_restarted,
            "num_retried": accounts.num_retried,
            **{f"failures/{boundary}": count for boundary, count in accounts.failures.items()},
            **{f"deaths/{role}": deaths.get(role, 0) for role in ROLES},
        }

    def free_some(self) -> bool:
        """Let go of the tokens of some groups that a durable checkpoint holds. Whether there are more."""
        groups = [self._to_free.popleft() for _ in range(min(FREED_AT_ONCE, len(self._to_free)))]
        if groups:
            with self._transaction():
                schema.free_rows(self.db, groups)
        return bool(self._to_free)

    def _free_rows(self, trained: Trained) -> None:
        """Tokens are needed until a later checkpoint is durable, and go by and by; texts of old groups go too."""
        batches = self._freed_batches, trained.checkpoint
        found = self.db.execute("SELECT id FROM groups WHERE batch >= ? AND batch < ?", batches)
        self._to_free.extend(group for (group,) in found)
        groups = self._freed_texts, self.accounts.next_group - KEPT_TEXTS
        self.db.execute("UPDATE samples SET completion = NULL WHERE group_id >= ? AND group_id < ?", groups)
        self.db.execute("UPDATE groups SET prompt_text = NULL WHERE id >= ? AND id < ?", groups)
        self._freed_batches, self._freed_texts = max(batches), max(groups)

    # ------------------------------------------------------------ transactions

    def close(self) -> None:
        self.db.close()

    @contextmanager
    def _transaction(self, durable: bool = False) -> Iterator[None]:
        """All or nothing; `durable` also survives power loss. Rows and events of the account go in with it."""
        if self._failure is not None:
            raise StorageError(f"the data store has failed: {self._failure}", where="data.sqlite")
        try:
            if durable:
                self.db.execute("PRAGMA synchronous=FULL")
            self.db.execute("BEGIN IMMEDIATE")
            before = self.db.total_changes
            yield
            evals = self._flush()
            self.db.execute("COMMIT")
            if durable:
                self.db.execute("PRAGMA synchronous=NORMAL")
        except BaseException as error:
            self._failure = error
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                raise _unwritable(error) from error
            raise
        self.changes += self.db.total_changes != before
        for row in evals:
            self.evals.append(row)

    def _flush(self) -> list[dict[str, object]]:
        """Rows and events of the account, into the open transaction. Returns evaluations that are done."""
        accounts = self.accounts
        if not (accounts.touched or accounts.touched_samples or accounts.events):
            return []
        events = accounts.drain_events()
        evals = [self._eval_row(e.version) for e in events if isinstance(e, EvalDone)]
        groups = [accounts.groups[g] for g in sorted(accounts.touched)]
        schema.save_groups(self.db, groups)
        schema.save_samples(self.db, filter(None, map(accounts.sample, sorted(accounts.touched_samples))))
        schema.free_rows(self.db, [g.id for g in groups if g.state in TERMINAL and g.update is None])
        schema.save_counters(self.db, accounts)
        self._put_events(events)
        for replica, incarnation, sample, epoch in accounts.cancelled:
            self._cancel.setdefault((replica, incarnation), {})[sample, epoch] = None
        accounts.cancelled.clear()
        accounts.forget_terminal()
        return evals

    def _put_events(self, events: Sequence[StoreEvent]) -> None:
        self.db.executemany(
            "INSERT INTO outbox (event) VALUES (?)", [(json.dumps(codec.encode(event)),) for event in events]
        )

    def _eval_row(self, version: Version) -> dict[str, object]:
        round_ = self.accounts.eval_rounds.pop(version)
        rewards = list(chain.from_iterable(round_.rewards))
        row: dict[str, object] = {
            "version": version.number,
            "time_s": self.clock(),
            "num_samples": len(rewards),
            "eval_reward_mean": fmean(rewards) if rewards else None,
            "eval_reward_best": fmean(map(max, round_.rewards)) if rewards else None,
        }
        self.db.execute("INSERT INTO evals VALUES (?, ?, ?)", (*version, json.dumps(row)))
        return row

    def _last_event(self) -> int:
        row = self.db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'outbox'").fetchone()
        return 0 if row is None else int(row[0])


def _unwritable(error: sqlite3.OperationalError) -> StorageError:
    return StorageError(f"the database can't be written: {error}", where="data.sqlite")
