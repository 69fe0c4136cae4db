"""From a config to a finished run: the run folder, Ray on this machine, the loop, and nothing left behind."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType

from laminar import config as configs
from laminar.config import Config
from laminar.data.rows import load_rows
from laminar.errors import ConfigError, RunFailed, StorageError
from laminar.run_folder import NODE, SHARED_MEMORY, RunFolder, read_json, read_jsonl, write_atomic, write_json
from laminar.runtime import guard
from laminar.types import ALLOCATOR

INTERRUPTED = 130
OBJECT_STORE_BYTES = 256 * 2**20
"""Batches pass through it; weights do not."""
NOT_NEEDED = ("start_monitor", "start_log_monitor", "start_api_server")
"""What Ray starts besides: to add machines, to bring logs to the driver, and for its dashboard. It is not used."""
LONGEST_PLACE = 22
"""Bytes of the folder in which Ray makes a session folder, and in that sockets, with names of its own."""


def train(config: Config, run_dir: Path, resume: bool, say: Callable[[str], None] = print) -> int:
    """Run `config` in `run_dir`, from the start or from where it was left. Returns the exit code.

    Raises UserError for what the user can mend before anything starts, RunFailed when the run fails.
    """
    began = time.monotonic()
    folder = prepare(config, run_dir, resume)
    with _signals() as (interrupted, install):
        try:
            with local_ray(folder.tag, [folder.slots(NODE)]):
                install()  # Ray has put its own handler of SIGTERM there
                return run_in(folder, config, began, interrupted, say)
        except SystemExit:  # what that handler does while Ray starts
            return INTERRUPTED


def prepare(config: Config, run_dir: Path, resume: bool) -> RunFolder:
    """A run folder that nobody uses, with the resolved config in it. Raises UserError if that can't be."""
    folder = RunFolder(run_dir)
    if resume:
        folder.expect_run()
        refuse_changes(configs.load(folder.config), config, folder)
    folder.create()
    _end_predecessor(folder)
    write_atomic(folder.config, configs.dump(config))
    return folder


def run_in(
    folder: RunFolder, config: Config, began: float, interrupted: threading.Event, say: Callable[[str], None]
) -> int:
    """Run in the Ray that is up. `began`: the monotonic instant of the command. Returns and raises as `train`."""
    from laminar.runtime.loop import run

    rows = len(load_rows(config.data.eval, folder.path)) if config.data.eval is not None else 0
    try:
        end, traceback = run(folder, config, config.settings(rows), began - _run_seconds(folder), interrupted, say)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        shutil.rmtree(folder.slots(NODE), ignore_errors=True)
    outcome = {"outcome": end.outcome, "message": end.message}
    if end.outcome == "failed":
        with suppress(StorageError):  # the disk may be full, which is then what the message says
            write_json(folder.run, outcome)
        raise _failed(end.message, traceback, folder)
    write_json(folder.run, outcome)
    return 0 if end.outcome == "completed" else INTERRUPTED


def refuse_changes(old: Config, new: Config, folder: RunFolder) -> None:
    """Raises ConfigError if `new` can't go on with what `old` began: promises made to groups would be broken."""
    fixed = {
        "train.groups_per_batch": (old.train.groups_per_batch, new.train.groups_per_batch),
        "train.group_size": (old.train.group_size, new.train.group_size),
        "seed": (old.seed, new.seed),
        "data.train": (old.data.train, new.data.train),
        "data.epochs": (old.data.epochs, new.data.epochs),
        "schedule": (old.schedule, new.schedule),
        "model.path": (old.model.path, new.model.path),
    }
    for key, (before, after) in fixed.items():
        if before != after:
            raise ConfigError(
                "can't be changed when a run is resumed",
                where=key,
                expected=str(before),
                got=str(after),
                fix="start a new run",
            )
    k_before, k_after = old.staleness_bound, new.staleness_bound
    if k_after is not None and (k_before is None or k_after < k_before):
        raise ConfigError(
            "can't be lowered when a run is resumed: groups were issued under the old bound",
            where="max_staleness",
            expected=f"at least {'none' if k_before is None else k_before}",
            got=str(k_after),
        )
    cuts = sum(1 for _ in read_jsonl(folder.metrics))
    if new.iterations is not None and new.iterations < cuts:
        raise ConfigError(
            "is below what has been trained already", where="iterations", expected=f">= {cuts}", got=str(new.iterations)
        )


def _failed(message: str, traceback: str | None, folder: RunFolder) -> RunFailed:
    """The one message of a failed run, after the traceback if there is one."""
    if traceback is not None:
        print(traceback.rstrip(), file=sys.stderr)
    return RunFailed(f"the run failed: {message}\n  logs: {folder.logs}\n  go on with: --resume {folder.path}")


def _run_seconds(folder: RunFolder) -> float:
    """Run seconds already spent: where the clock goes on after a resume."""
    logs = sorted(folder.events.glob("*.jsonl"))
    return max((row.get("now", 0.0) for log in logs for row in read_jsonl(log)), default=0.0)


def _end_predecessor(folder: RunFolder) -> None:
    """Make sure that nobody else runs in this folder. Raises StorageError if its driver is alive."""
    for process in read_json(folder.processes, {"processes": []})["processes"]:
        if process["role"] == "driver" and _is_driver(process["pid"]):
            raise StorageError(
                f"this run is going on in process {process['pid']}", where=str(folder.path), fix="stop it first"
            )
    guard.kill_marked(folder.tag)
    for left in SHARED_MEMORY.glob(f"laminar-{folder.tag}-*"):
        shutil.rmtree(left, ignore_errors=True)


def _is_driver(pid: int) -> bool:
    """Whether this process exists, is not we, and looks like a Laminar driver (pids are used again)."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return pid != os.getpid() and b"laminar" in command


@contextmanager
def _signals() -> Iterator[tuple[threading.Event, Callable[[], None]]]:
    """SIGINT and SIGTERM ask for an orderly end; the second one ends at once (the guard sweeps).

    Yields the event that is set then, and what puts the handlers in place (again).
    """
    interrupted = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        yield interrupted, lambda: None
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            os._exit(INTERRUPTED)
        interrupted.set()

    def install() -> None:
        for number in numbers:
            signal.signal(number, ask)

    before = {number: signal.getsignal(number) for number in numbers}
    install()
    try:
        yield interrupted, install
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def session_folder(places: Sequence[str]) -> Path:
    """A new folder for Ray's sockets in the first of these that will do: their whole paths may have 107 bytes.

    Raises StorageError if there is none.
    """
    for place in places:
        if len(os.fsencode(place)) <= LONGEST_PLACE and os.access(place, os.W_OK):
            return Path(tempfile.mkdtemp(prefix="laminar-ray-", dir=place))
    raise StorageError(
        "there is no place for Ray's sockets",
        where="TMPDIR",
        expected=f"a folder that can be written to, with a path of at most {LONGEST_PLACE} bytes",
        got=", ".join(places),
        fix="make one, and set TMPDIR to it",
    )


@contextmanager
def local_ray(tag: str, folders: Sequence[Path]) -> Iterator[None]:
    """A Ray of our own while the block lasts, and nothing of it afterwards, `folders` included.

    It listens on loopback only, asks for a token that only our processes know, sends nothing home, has no dashboard.
    """
    session = session_folder([tempfile.gettempdir(), "/tmp", "/dev/shm"])
    leftovers = [*folders, session]
    environment = {
        guard.MARK: tag,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # the name is Ray's: with 0 its servers listen on 127.0.0.1 instead of on all interfaces
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        **ALLOCATOR,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    watch = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), tag, *map(str, leftovers)],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
    )
    with _environment(environment):
        import ray

        _read_environment(ray)
        try:
            with _without(ray._private.node.Node, NOT_NEEDED):
                ray.init(
                    num_cpus=os.cpu_count(),
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=OBJECT_STORE_BYTES,
                    namespace="laminar",
                    _temp_dir=str(session),
                )
            _silence(ray)
            yield
        finally:
            ray.shutdown()
            guard.kill_marked(tag)
            watch.kill()
            watch.wait()
            for left in leftovers:
                shutil.rmtree(left, ignore_errors=True)


def _read_environment(ray: ModuleType) -> None:
    """Ray does so when it is first imported, which a script of the user's or an earlier run here may have done."""
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def _silence(ray: ModuleType) -> None:
    """Ray prints a paragraph on stdout for each process that dies. We say it in a line, and keep details in logs/."""
    ray._private.worker.print_to_stdstream = lambda data, ignore_prefix: None


@contextmanager
def _without(kind: type, methods: Sequence[str]) -> Iterator[None]:
    """In the block these methods do nothing; those that are not there are not missed."""
    before = {name: getattr(kind, name) for name in methods if hasattr(kind, name)}
    for name in before:
        setattr(kind, name, lambda self, *arguments, **options: None)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(kind, name, method)


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started in the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
