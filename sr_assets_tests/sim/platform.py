"""The platform inside a simulation: what it uses of time, threads, sockets and chance is replaced; its code is unchanged."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import json
import os
import random
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import duckdb
import pytest

from sr_assets.adapters import control, crash_points, times
from sr_assets.adapters.copying import copier
from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.nats import administration, client, object_store
from sr_assets.adapters.published import history as published_history
from sr_assets.adapters.state.lease import Lease
from sr_assets.adapters.state.lock import SiteBusyError
from sr_assets.adapters.state.operator_requests import Answer, Request
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.adapters.wire import connection
from sr_assets.settings import Settings, StreamSettings, load_settings
from sr_assets.stages import campaign, checkpointing, site
from sr_assets.stages.leadership import lead_all
from sr_assets.stages.replication import replica
from sr_assets.stages.replication.recover import recover_stream
from sr_assets.stages.report import Stage, StreamReport
from sr_assets.stages.run import SiteRun
from sr_assets.stages.site import Site
from sr_assets.stages.source import lag
from sr_assets.stages.tracking import node_state
from sr_assets_tests.sim import world
from sr_assets_tests.sim.network import Network, SimClient, SimClientThread, SimLink, SimLoop
from sr_assets_tests.sim.world import (
    SECOND_NS,
    Killed,
    Process,
    SimCondition,
    SimEvent,
    SimExecutor,
    SimLock,
    SimThread,
    World,
)

SITE: Final = "LONDON"
#: The block `spark` that keeps every batch in the run's process.
IN_PROCESS: Final = {"from_messages": 1_000_000}
_connect: Final = duckdb.connect
_publish: Final = Site.publish
_OPTIMIZERS: Final = ",".join(name for (name,) in duckdb.execute("SELECT name FROM duckdb_optimizers()").fetchall())
_save, _transaction, _write, _apply = SiteState.save_stream, SiteState.transaction, Lease.write, node_state._apply
#: Where homes need no disk, or None for the usual folder of temporary files.
IN_MEMORY: Final = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
#: CPU time, which nothing costs here; the rest of the module as it is.
_NO_COST: Final = SimpleNamespace(**{**vars(time), "process_time": lambda: 0.0, "thread_time": lambda: 0.0})


def _ignore_killed(unraisable: Any) -> None:
    """Ignore what the garbage collector meets when it closes generators, coroutines and files of killed processes."""
    error = unraisable.exc_value
    if not isinstance(error, Killed | ResourceWarning) and "ignored GeneratorExit" not in str(error):
        sys.__unraisablehook__(unraisable)


def _connect_without_threads(
    database: str = ":memory:", read_only: bool = False, config: dict[str, Any] | None = None
) -> duckdb.DuckDBPyConnection:
    """Connect to DuckDB without threads of its own, a tenth of a history's CPU time, and without its optimizers, a fifth."""
    return _connect(database, read_only, {**(config or {}), "threads": 1, "disabled_optimizers": _OPTIMIZERS})


class _ProcessLock:
    """A lock of a module: each process has its own."""

    def __init__(self) -> None:
        self._locks: dict[Process, SimLock] = {}

    def __enter__(self) -> None:
        self._locks.setdefault(world.current().process, SimLock()).acquire()

    def __exit__(self, *_: object) -> None:
        self._locks[world.current().process].release()


def _close_control_stores() -> None:
    """Close all connections to control stores; the platform keeps one whose file was deleted."""
    connections = control._connections
    connections._close_all()
    connections.guard.release()
    while connections._left:
        connections._left.pop().close()


@contextlib.contextmanager
def simulated(
    seed: int,
    begin_ns: int,
    most_steps: int = 30_000,
    *,
    publishes: Callable[[], bool] = lambda: True,
    commits: Callable[[StreamState], None] = lambda _: None,
    leads: Callable[[Path], None] = lambda _: None,
    acts: Callable[[StreamState, Request], None] = lambda _state, _request: None,
) -> Iterator[tuple[World, Network]]:
    """Replace time, threads, sockets and chance inside the block, by those of a new world.

    While `publishes` returns False, no tables are published, which take a quarter of a history's CPU time. `commits` is
    called with each progress of reading that a process has committed, `leads` with the folder of each lease that a process
    has written and that holds, `acts` with each request of an operator that has changed a node, and the progress then.
    """
    simulation = World(seed, begin_ns, most_steps)
    net = Network(simulation)
    chance = random.Random(seed)

    def own_ns() -> int:
        return simulation.now_ns + simulation.process.clock_ns

    def publish(site: Site, **options: bool) -> None:
        if publishes():
            _publish(site, **options)
        else:
            site._changed = site._has_events = False

    with pytest.MonkeyPatch.context() as patch:
        world.enter(simulation)
        patch.setattr(SimLink, "network", net, raising=False)
        patch.setattr(times, "time_ns", own_ns)
        patch.setattr(times, "time", lambda: own_ns() / SECOND_NS)
        patch.setattr(times, "monotonic", lambda: simulation.seconds)
        patch.setattr(times, "boot_seconds", lambda: simulation.seconds)
        patch.setattr(times, "sleep", simulation.sleep)
        patch.setattr(threading, "Thread", SimThread)
        patch.setattr(threading, "Event", SimEvent)
        patch.setattr(threading, "Lock", SimLock)
        patch.setattr(threading, "RLock", lambda: SimLock(reentrant=True))
        patch.setattr(threading, "Condition", SimCondition)
        for module in (copier, published_history, lag, concurrent.futures):
            patch.setattr(module, "ThreadPoolExecutor", SimExecutor)
        for module in (site, checkpointing):
            patch.setattr(module, "time", _NO_COST)
        patch.setattr(replica, "_SUSPECTS", _ProcessLock())
        patch.setattr(connection, "Link", SimLink)
        patch.setattr(client, "SecuredClient", SimClient)
        for module in (administration, object_store):
            patch.setattr(module, "ClientThread", SimClientThread)
        patch.setattr(campaign, "instance_of", lambda folder: f"instance-{folder.parent.parent.name}")
        patch.setattr(secrets, "token_hex", lambda count=16: f"{chance.getrandbits(8 * count):0{2 * count}x}")
        patch.setattr(duckdb, "connect", _connect_without_threads)
        patch.setattr(Site, "publish", publish)
        _tell(patch, simulation, commits, leads, acts)
        random.seed(seed)
        patch.setattr(sys, "unraisablehook", _ignore_killed)
        # A coroutine of nats-py that is closed outside of a loop would make one.
        asyncio.set_event_loop(SimLoop(simulation))
        # What is older than the world takes no part in its collections.
        gc.freeze()
        try:
            yield simulation, net
        finally:
            simulation.end()
            _close_control_stores()
            gc.collect()
            gc.unfreeze()
            asyncio.set_event_loop(None)
            world.enter(None)


def _tell(
    patch: pytest.MonkeyPatch,
    simulation: World,
    commits: Callable[[StreamState], None],
    leads: Callable[[Path], None],
    acts: Callable[[StreamState, Request], None],
) -> None:
    """Tell what processes have committed and written, see `simulated`."""
    #: What to call when each open transaction is committed.
    committed: dict[SiteState, list[Callable[[], None]]] = {}

    def save(store: SiteState, state: StreamState) -> None:
        _save(store, state)
        committed[store].append(partial(commits, replace(state)))

    def apply(
        store: SiteState, stream: StreamSettings, state: StreamState, report: StreamReport, request: Request
    ) -> Answer:
        answer = _apply(store, stream, state, report, request)
        if answer.done:
            committed[store].append(partial(acts, replace(state), request))
        return answer

    @contextlib.contextmanager
    def transaction(store: SiteState, *, after: int = 0) -> Iterator[None]:
        committed[store] = []
        with _transaction(store, after=after):
            yield
        for call in committed.pop(store):
            call()

    def write(lease: Lease, folder: Path) -> None:
        _write(lease, folder)
        if lease.holds and not simulation.process.dead:
            leads(folder)

    for owner, name, told in (
        (SiteState, "save_stream", save),
        (SiteState, "transaction", transaction),
        (node_state, "_apply", apply),
        (Lease, "write", write),
    ):
        patch.setattr(owner, name, told)


def _run(settings: Settings, name: str, run_id: str) -> dict[str, StreamReport]:
    """Run a site until all work is done, and return what it did by stream."""
    with Site(settings, name, owner="run", run_id=run_id, wait_seconds=0) as opened:
        selection = {entry.stream: frozenset(Stage) for entry in opened.entries}
        work = SiteRun(opened, selection, drain_only=True)
        for _ in work.rounds():
            pass
        return work.reports


class Home:
    """A home of one member, and the process that works on it."""

    def __init__(self, simulation: World, folder: Path, name: str, clock_ns: int = 0) -> None:
        self.world, self.folder, self.name = simulation, folder / name, name
        self.clock_ns = clock_ns
        self.process: Process | None = None
        #: What campaigns for the site, with an election.
        self.service: Process | None = None
        #: A second run of the site, which the first one keeps out.
        self.rival: Process | None = None
        self.reports: dict[str, StreamReport] = {}
        self.error: BaseException | None = None
        #: Whether the process has done its work, and was not killed.
        self.completed = False
        self._saved: Path | None = None
        self.folder.mkdir(parents=True)

    def configure(self, document: dict[str, Any]) -> Settings:
        """Return the settings of a configuration."""
        file = self.folder / "replication.yaml"
        # JSON is YAML.
        file.write_text(json.dumps({"state_store": str(self.folder), **document}))
        return load_settings(file, {})

    def start(self, settings: Settings, name: str = SITE) -> None:
        """Start a run of a site in a new process, which ends when all work is done."""

        def run() -> None:
            self.reports = _run(settings, name, self.name)

        self._act(run, f"run of {self.name}")

    def start_rival(self, settings: Settings) -> None:
        """Start another run of the site beside the process, or in its place if it has not begun yet."""
        self.rival = Process(self.world, self.name, self.clock_ns)

        def act() -> None:
            with contextlib.suppress(SiteBusyError):
                _run(settings, SITE, f"rival of {self.name}")

        SimThread(target=act, name=f"rival of {self.name}", process=self.rival).start()

    def recover(self, settings: Settings, *, force: bool = False) -> None:
        """Start `recover` of the site's only stream in a new process, with `force` of a readable state."""
        (stream,) = (entry for entry in settings.sites[SITE] if isinstance(entry, StreamSettings))
        self._act(lambda: recover_stream(settings, stream, force=force), f"recovery of {self.name}")

    def _act(self, work: Callable[[], object], name: str) -> None:
        assert self.process is None or not self.process.alive
        self.process = Process(self.world, self.name, self.clock_ns)
        self.reports, self.error, self.completed = {}, None, False

        def act() -> None:
            try:
                work()
                self.completed = True
            except Exception as error:  # noqa: BLE001  the history decides whether it may
                self.error = error

        SimThread(target=act, name=name, process=self.process).start()

    @property
    def processes(self) -> list[Process]:
        """The processes of the home that were started last."""
        return [each for each in (self.process, self.service, self.rival) if each is not None]

    def jump(self, clock_ns: int) -> None:
        """Set the clock of the home's machine, to what it is ahead of the world's."""
        self.clock_ns = clock_ns
        for process in self.processes:
            process.clock_ns = clock_ns

    def serve(self, settings: Settings) -> None:
        """Campaign for the site in a process of its own, as `up` does, until it is killed."""
        self.service = Process(self.world, self.name, self.clock_ns)

        def campaign() -> None:
            with lead_all(settings):
                self.world.sleep(1e9)

        SimThread(target=campaign, name=f"service of {self.name}", process=self.service).start()

    def kill(self) -> None:
        """Kill the home's processes: it stays as it is on the disk now."""
        living = [each for each in self.processes if each.alive and not each.dead]
        if not living or self._saved is not None:
            return
        self._saved = self.folder.with_name(f"{self.folder.name}.saved")
        shutil.copytree(self.folder, self._saved)
        # The one that acts now last: its end ends this call too.
        for process in sorted(living, key=lambda each: each is self.world.process):
            process.kill()

    def bury(self) -> None:
        """Wait until killed processes have ended, and undo what their end did in the home."""
        while any(each.dead and each.alive for each in self.processes):
            self.world.sleep(0.001)
        if self._saved is not None:
            shutil.rmtree(self.folder)
            self._saved.rename(self.folder)
            self._saved = None

    @property
    def lease(self) -> Lease:
        """What its last campaign for the site has written."""
        return Lease.read((self._saved or self.folder) / "sites" / SITE)

    @property
    def is_dead(self) -> bool:
        """Whether its processes were killed and it has not been buried."""
        return self._saved is not None

    def join(self) -> None:
        """Wait for the end of the process, and of its rival."""
        while any(each is not None and each.alive for each in (self.process, self.rival)):
            self.world.sleep(0.05)


def install_hook(homes: list[Home], reached: Callable[[Home, Point], None] = lambda _home, _point: None) -> None:
    """Call `reached` with each crash point that a process passes, and its home."""

    def hook(point: Point) -> None:
        process = world.current().process
        if process.dead:
            raise Killed
        for home in homes:
            if process in (home.process, home.rival):
                reached(home, point)

    crash_points.hook = hook
