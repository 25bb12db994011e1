"""Random faults of a soak: killed and suspended processes, target outages, a rolled-back source."""

from __future__ import annotations

import random
import time
from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import psutil

from sr_assets.adapters.spark.engine import engine_status
from sr_assets_bench.soak.runs import Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from sr_assets.embedded.nats_server import NatsServer
    from sr_assets_bench.soak.runs import Operator
    from sr_assets_bench.soak.source import SourceStore
    from sr_assets_tests.rig import Rig

#: Seconds between two faults, of a server's absence, and of a server's suspension; each is drawn evenly between two
#: bounds.
_PAUSE_SECONDS: Final = (0.5, 7.0)
#: One pause in so many is longer, up to a share of the soak: a site under constant faults only falls behind.
_CALM_AMONG: Final = 6
_CALM_SHARE: Final = 1 / 30
_GONE_SECONDS: Final = (0.1, 3.0)
_STILL_SECONDS: Final = (1.0, 7.0)
#: Numbers of rare faults in a soak; the share determines how long the target is absent and how old the restored copy
#: is: some seconds of a minute, some minutes of half an hour.
_RARE: Final = 3
_RARE_WITHIN: Final = (0.3, 0.9)
_AWAY_SHARE: Final = (0.05, 0.15)
_COPY_AGE_SHARE: Final = (0.02, 0.1)
#: Within this time without the target, at least one message must be read.
_WATCHING_SECONDS: Final = 60.0


class Fault(StrEnum):
    """The kinds of faults. Killed means SIGKILL; a killed server is started again, a stopped one continues."""

    RUN_KILLED = "run killed"
    RUN_ENDED = "run ended"
    WORKER_KILLED = "worker killed"
    ENGINE_KILLED = "engine killed"
    SOURCE_KILLED = "source killed"
    TARGET_KILLED = "target killed"
    SOURCE_STOPPED = "source stopped"
    TARGET_STOPPED = "target stopped"
    TARGET_AWAY = "target away"
    SOURCE_COPIED = "source killed and its store copied"
    SOURCE_PUT_BACK = "source put back from the copy"


_RARE_FAULTS: Final = (Fault.TARGET_AWAY, Fault.SOURCE_COPIED, Fault.SOURCE_PUT_BACK)
_FREQUENT: Final = tuple(fault for fault in Fault if fault not in _RARE_FAULTS)

#: After these faults the site starts again, which takes time: they wait until it has worked since the last one.
_SETBACKS: Final = frozenset({Fault.RUN_KILLED, Fault.RUN_ENDED, Fault.ENGINE_KILLED})


class Gremlin:
    """Causes faults at random times and ends the lasting ones; call `tend` often.

    A seed draws the same faults; their effect depends on timing. A fault without effect is not counted. `plan` are the
    rare faults: their times in seconds, kinds and durations. They wait until their object exists.
    """

    def __init__(self, rig: Rig, store: SourceStore, operator: Operator, chance: random.Random, seconds: float) -> None:
        self.faults: Counter[Fault] = Counter()
        self.plan = _rare_faults(chance, seconds)
        self._rig, self._store = rig, store
        self._operator = operator
        self._chance = chance
        self._calm_seconds = _CALM_SHARE * seconds
        self._strike_at = time.monotonic() + self._pause_seconds()
        self._progress = Progress(rig.home)
        self._begun_at = time.monotonic()
        away = [planned for planned in self.plan if planned[1] is Fault.TARGET_AWAY]
        self._rare = [away, [planned for planned in self.plan if planned not in away]]
        self._healing: dict[NatsServer, tuple[float, Callable[[], object]]] = {}

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
        """Cause a rare fault, unless its server is down, or no message was read that the copy does not hold."""
        server = self._rig.target if fault is Fault.TARGET_AWAY else self._rig.source
        ready = fault is not Fault.SOURCE_PUT_BACK or self._store.behind(self._progress.positions())
        if server in self._healing or not ready:
            return False
        self._operator.note(f"{fault} for {lasting:.1f} s")
        self.faults[fault] += 1
        heal: Callable[[], object] = server.start
        if fault is Fault.SOURCE_COPIED:
            ends = self._store.ends()
            server.kill()
            self._store.keep(ends)
        elif fault is Fault.SOURCE_PUT_BACK:
            server.kill()
            self._store.put_back()
        else:
            heal = self._return_of_the_target(lasting)
            server.kill()
        self._healing[server] = (time.monotonic() + lasting, heal)
        return True

    def _return_of_the_target(self, lasting: float) -> Callable[[], object]:
        """Restart the target; the nodes must have been tracked during its absence."""
        before = self._progress.positions()

        def heal() -> None:
            if lasting >= _WATCHING_SECONDS and self._progress.positions() == before:
                self._operator.complaints.append(f"nothing was read while the target was away for {lasting:.0f} s")
            self._operator.note("target back")
            self._rig.target.start()

        return heal

    def _strike(self, fault: Fault) -> bool:
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
                return self._kill_server(self._rig.target)
            case Fault.SOURCE_STOPPED:
                return self._stop_server(self._rig.source)
            case Fault.TARGET_STOPPED:
                return self._stop_server(self._rig.target)
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
        self._healing[server] = (time.monotonic() + self._chance.uniform(*_GONE_SECONDS), server.start)
        return True

    def _stop_server(self, server: NatsServer) -> bool:
        if server in self._healing:
            return False
        process = psutil.Process(server.pid)
        process.suspend()
        self._healing[server] = (time.monotonic() + self._chance.uniform(*_STILL_SECONDS), process.resume)
        return True


def _rare_faults(chance: random.Random, seconds: float) -> list[tuple[float, Fault, float]]:
    """Draw the times of the rare faults in a soak, one of each kind after the other, and their durations."""
    drawn = []
    for number in range(_RARE):
        away_at, put_back_at = ((number + chance.uniform(*_RARE_WITHIN)) / _RARE * seconds for _ in range(2))
        copied_at = put_back_at - chance.uniform(*_COPY_AGE_SHARE) * seconds
        drawn.append((away_at, Fault.TARGET_AWAY, chance.uniform(*_AWAY_SHARE) * seconds))
        drawn.append((copied_at, Fault.SOURCE_COPIED, chance.uniform(*_GONE_SECONDS)))
        drawn.append((put_back_at, Fault.SOURCE_PUT_BACK, chance.uniform(*_GONE_SECONDS)))
    return sorted(drawn)


def _runs(process: psutil.Process, program: str) -> bool:
    """Return whether a process's command names a program; a process that has ended has no command."""
    try:
        return any(program in argument for argument in process.cmdline()[:3])
    except psutil.NoSuchProcess:
        return False
