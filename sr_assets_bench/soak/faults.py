"""Random faults of a soak: killed and suspended processes, target outages, limits, a rolled-back source, a lost state."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final

import psutil

from sr_assets.adapters.spark.engine import engine_status
from sr_assets.domain.errors import RunError
from sr_assets_bench.soak.fault_plan import GONE_SECONDS, RARE_FAULTS, Fault, plan_rare_faults
from sr_assets_bench.soak.runs import Progress

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from sr_assets.embedded.nats_server import NatsServer
    from sr_assets_bench.soak.runs import Operator
    from sr_assets_bench.soak.servers import LimitedServer, SourceStore
    from sr_assets_bench.soak.wrong_clock import WrongClock
    from sr_assets_tests.rig import Rig

#: Seconds between two faults, and of a server's suspension; each is drawn evenly between two bounds.
_PAUSE_SECONDS: Final = (0.5, 7.0)
#: One pause in so many is longer, up to a share of the soak: a site under constant faults only falls behind.
_CALM_AMONG: Final = 6
_CALM_SHARE: Final = 1 / 30
_STILL_SECONDS: Final = (1.0, 7.0)
#: Within this time without the target, at least one message must be read.
_WATCHING_SECONDS: Final = 60.0


_FREQUENT: Final = tuple(fault for fault in Fault if not any(fault in group for group in RARE_FAULTS))

#: After these faults the site starts again, which takes time: they wait until it has worked since the last one.
_SETBACKS: Final = frozenset({Fault.RUN_KILLED, Fault.RUN_ENDED, Fault.ENGINE_KILLED})

#: These faults never overlap with a lost state: after a rollback of the advisories, only the target proves the loss.
_TARGET_FAULTS: Final = frozenset({Fault.TARGET_KILLED, Fault.TARGET_STOPPED, Fault.TARGET_AWAY, Fault.TARGET_LIMITED})


class Gremlin:
    """Causes faults at random times and ends the lasting ones; call `tend` often.

    A seed draws the same faults; their effect depends on timing. A fault without effect is not counted. `plan` are the
    rare faults: their times in seconds, kinds and durations. They wait until their object exists. A command of the operator
    holds `state` while it needs the site's state.
    """

    def __init__(
        self,
        rig: Rig,
        target: LimitedServer,
        advisories: str,
        store: SourceStore,
        clock: WrongClock,
        operator: Operator,
        chance: random.Random,
        seconds: float,
        state: threading.Lock,
    ) -> None:
        self._state = state
        self.faults: Counter[Fault] = Counter()
        self.plan = plan_rare_faults(chance, seconds)
        self._rig, self._store, self._clock = rig, store, clock
        self._target, self._advisories = target, advisories
        self._operator = operator
        self._chance = chance
        self._calm_seconds = _CALM_SHARE * seconds
        self._strike_at = time.monotonic() + self._pause_seconds()
        self._progress = Progress(rig.home)
        self._begun_at = time.monotonic()
        self._rare = [[planned for planned in self.plan if planned[1] in group] for group in RARE_FAULTS]
        #: The time and the way to heal each affected server, or the site's state.
        self._healing: dict[object, tuple[float, Callable[[], object]]] = {}

    def tend(self) -> None:
        """End the faults that are due, and cause the next one if it is due."""
        now = time.monotonic()
        self.heal(until=now)
        for rare in self._rare:
            if rare and now - self._begun_at >= rare[0][0] and self._strike_rarely(*rare[0][1:]):
                del rare[0]
        if now >= self._strike_at:
            fault = self._chance.choice(_FREQUENT)
            self._strike_at = now + self._pause_seconds()
            if fault in _SETBACKS and not self._progress.moved():
                return
            if not self._strike(fault):
                self._operator.note(f"{fault}: there is none")
                return
            self.faults[fault] += 1
            self._operator.note(fault)

    def heal(self, until: float = float("inf")) -> None:
        """Restart the servers that are due, or all if no time is given."""
        for server, (when, heal) in list(self._healing.items()):
            if when <= until:
                del self._healing[server]
                heal()

    def _pause_seconds(self) -> float:
        calm = self._chance.uniform(0, self._calm_seconds) if self._chance.randrange(_CALM_AMONG) == 0 else 0.0
        return self._chance.uniform(*_PAUSE_SECONDS) + calm

    def _strike_rarely(self, fault: Fault, lasting: float) -> bool:
        """Cause a rare fault, unless its object is affected by another, or it would have no effect."""
        affected = {
            Fault.TARGET_AWAY: self._target,
            Fault.TARGET_LIMITED: self._target,
            Fault.STATE_LOST: self._operator,
            Fault.CLOCK_AHEAD: self._clock,
        }
        place = affected.get(fault, self._rig.source)
        if place in self._healing or not self._is_ready(fault):
            return False
        self._operator.note(f"{fault} for {lasting:.1f} s")
        self.faults[fault] += 1
        self._healing[place] = (time.monotonic() + lasting, self._begin_lasting(fault, lasting))
        return True

    def _begin_lasting(self, fault: Fault, lasting: float) -> Callable[[], object]:
        """Cause a lasting fault and return the way to heal it."""
        match fault:
            case Fault.SOURCE_COPIED:
                ends = self._store.ends()
                self._rig.source.kill()
                self._store.keep(ends)
                return self._rig.source.start
            case Fault.SOURCE_PUT_BACK:
                self._rig.source.kill()
                self._store.put_back()
                return self._rig.source.start
            case Fault.TARGET_LIMITED:
                self._target.limit(1)
                return partial(self._target.limit, -1)
            case Fault.ADVISORIES_FULL:
                self._limit_advisories(max(1, self._rig.info(self._advisories).messages))
                return partial(self._limit_advisories, -1)
            case Fault.STATE_LOST:
                return self._lose_state()
            case Fault.CLOCK_AHEAD:
                self._clock.set_ahead()
                return self._clock.correct
        heal = self._return_of_the_target(lasting)
        self._target.kill()
        return heal

    def _is_ready(self, fault: Fault) -> bool:
        """Return whether a fault has an effect: a message was read that the copy lacks, or each stream has a copy."""
        if fault is Fault.SOURCE_PUT_BACK:
            return self._store.behind(self._progress.positions())
        if fault is Fault.STATE_LOST:
            return self._target not in self._healing and self._all_copied() and self._state.acquire(blocking=False)
        return fault not in _TARGET_FAULTS or self._operator not in self._healing

    def _all_copied(self) -> bool:
        """Return whether the target holds a copy of each stream, without which an empty state is not a lost one."""
        own = (entry for entry in self._rig.entries if entry["target_url"] == self._target.url)
        targets = (entry.get("target_stream", entry["stream"]) for entry in own)
        try:
            return all(self._rig.info(target, self._target).last_sequence for target in targets)
        except RunError:
            return False

    def _limit_advisories(self, max_messages: int) -> None:
        """Let the advisory stream refuse all messages beyond this number, -1 for none."""
        config = {
            "name": self._advisories,
            "subjects": [f"{self._advisories}.>"],
            "allow_direct": True,
            "max_msgs": max_messages,
            "discard": "new",
        }
        answer = self._rig.api(f"STREAM.UPDATE.{self._advisories}", config)
        assert "error" not in answer, answer

    def _lose_state(self) -> Callable[[], object]:
        """Set the site's folder aside; until it returns, each run must refuse to start, and announce nothing."""
        folder, aside = self._rig.home / "sites", self._rig.home / "sites.aside"
        self._operator.kill()
        folder.rename(aside)

        def heal() -> None:
            self._operator.kill()
            shutil.rmtree(folder, ignore_errors=True)
            aside.rename(folder)
            self._state.release()

        return heal

    def _return_of_the_target(self, lasting: float) -> Callable[[], object]:
        """Restart the target; the nodes must have been tracked during its absence."""
        before = self._progress.positions()

        def heal() -> None:
            if lasting >= _WATCHING_SECONDS and self._progress.positions() == before:
                self._operator.complaints.append(f"nothing was read while the target was away for {lasting:.0f} s")
            self._operator.note("target back")
            self._target.start()

        return heal

    def _strike(self, fault: Fault) -> bool:
        if fault in _TARGET_FAULTS and self._operator in self._healing:
            return False
        match fault:
            case Fault.RUN_KILLED:
                return self._operator.kill()
            case Fault.RUN_ENDED:
                return self._operator.end()
            case Fault.WORKER_KILLED:
                return self._kill_of_engine("pyspark.daemon")
            case Fault.ENGINE_KILLED:
                return self._kill_of_engine("java")
            case Fault.SOURCE_KILLED:
                return self._kill_server(self._rig.source)
            case Fault.TARGET_KILLED:
                return self._kill_server(self._target)
            case Fault.SOURCE_STOPPED:
                return self._stop_server(self._rig.source)
            case Fault.TARGET_STOPPED:
                return self._stop_server(self._target)
        raise ValueError(f"{fault} is a rare one")

    def _kill_of_engine(self, program: str) -> bool:
        """Kill one of the engine's processes by the program in its command: the JVM, or one of its Python workers."""
        engine = engine_status(self._rig.home)
        try:
            family = psutil.Process(engine.pid).children(recursive=True) if engine else []
            self._chance.choice([process for process in family if _runs(process, program)]).kill()
        except (psutil.NoSuchProcess, IndexError):
            return False
        return True

    def _kill_server(self, server: NatsServer) -> bool:
        if server in self._healing:
            return False
        server.kill()
        self._healing[server] = (time.monotonic() + self._chance.uniform(*GONE_SECONDS), server.start)
        return True

    def _stop_server(self, server: NatsServer) -> bool:
        if server in self._healing:
            return False
        process = psutil.Process(server.pid)
        process.suspend()
        self._healing[server] = (time.monotonic() + self._chance.uniform(*_STILL_SECONDS), process.resume)
        return True


def _runs(process: psutil.Process, program: str) -> bool:
    """Return whether a process's command names a program; a process that has ended has no command."""
    try:
        return any(program in argument for argument in process.cmdline()[:3])
    except psutil.NoSuchProcess:
        return False
