"""What a soak does to the platform: a site that is run again and again, and random faults that hit all it is made of.

Not here: the fleet, the duration, the verdict (`soak`).
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import psutil

from sr_assets.adapters.spark.engine import engine_status
from sr_assets_tests.faults.rig import start_run

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

    from sr_assets.embedded.nats_server import NatsServer
    from sr_assets_tests.rig import Rig

#: How long a run may go on without a batch once nothing disturbs it any more.
_PATIENCE_SECONDS: Final = 150.0
_LOOK_SECONDS: Final = 1.0
#: Between two faults, for how long a server is gone, for how long it stands still; each evenly between two bounds.
_PAUSE_SECONDS: Final = (0.5, 7.0)
_GONE_SECONDS: Final = (0.1, 3.0)
_STILL_SECONDS: Final = (1.0, 7.0)


class Fault(StrEnum):
    """What can happen. Killed is SIGKILL; a server that is killed is started again, one that is stopped goes on."""

    RUN_KILLED = "run killed"
    RUN_ENDED = "run ended"
    WORKER_KILLED = "worker killed"
    ENGINE_KILLED = "engine killed"
    SOURCE_KILLED = "source killed"
    TARGET_KILLED = "target killed"
    SOURCE_STOPPED = "source stopped"
    TARGET_STOPPED = "target stopped"


#: After these the site begins again, which takes a while: they wait until it has begun a batch since the last.
_SETBACKS: Final = frozenset({Fault.RUN_KILLED, Fault.RUN_ENDED, Fault.ENGINE_KILLED})


def last_batch(home: Path) -> float:
    """Return when a site last began a batch, in unix seconds; 0.0 for never."""
    return max((file.stat().st_mtime for file in home.glob("sites/*/writers/*/batch")), default=0.0)


@dataclass(slots=True)
class _Run:
    """A run under way: how it was started, where in the log its output begins, and what signal of ours it got."""

    process: subprocess.Popen[bytes]
    mode: str
    output_at: int
    signalled: signal.Signals | None = None


class Operator:
    """Runs a site again and again, `--once` or `--follow`, as somebody at a keyboard would; `tend` is called often.

    `ends` counts how the runs ended, `complaints` says which ended as no run may: with another exit code than 0 or 1
    that no signal of ours explains, or with a traceback. What they say is in `runs.log`.
    """

    def __init__(self, rig: Rig, chance: random.Random) -> None:
        self.ends: Counter[str] = Counter()
        self.complaints: list[str] = []
        self._rig = rig
        self._log = rig.home / "runs.log"
        self._chance = chance
        self._run: _Run | None = None

    def tend(self) -> None:
        """Start the next run when the last one has ended."""
        if self._run is not None and self._run.process.poll() is None:
            return
        self._note_end()
        self._begin(self._chance.choice(("--once", "--follow")))

    def kill(self) -> bool:
        """Kill the run under way, with which all that it started dies but the engine; whether there was one."""
        return self._signal(signal.SIGKILL)

    def end(self) -> bool:
        """Ask the run under way to end; whether there was one."""
        return self._signal(signal.SIGTERM)

    def finish(self) -> bool:
        """See the run under way end, by itself unless it follows; then let a last one drain; whether that succeeded."""
        if self._run is not None and self._run.mode == "--follow":
            self.end()
        self._await_end()
        self._begin("--once")
        if self._await_end() == 0:
            return True
        said = self._log.read_text(errors="replace").splitlines()
        self.complaints.append(f"the last run did not succeed: {said[-1]}")
        return False

    def note(self, what: str) -> None:
        """Write down what happens besides, between what the runs say."""
        with self._log.open("a") as log:
            log.write(f"--- {time.strftime('%H:%M:%S')} {what}\n")

    def _begin(self, mode: str) -> None:
        self.note(f"run {mode}")
        with self._log.open("ab") as log:
            output_at = log.tell()
            self._run = _Run(start_run(self._rig, mode=mode, log=log), mode, output_at)

    def _signal(self, number: signal.Signals) -> bool:
        if self._run is None or self._run.process.poll() is not None:
            return False
        self._run.process.send_signal(number)
        self._run.signalled = number
        return True

    def _await_end(self) -> int | None:
        """Wait for the run under way, as long as it does something; returns its exit code, None when there was none."""
        began = time.time()
        while self._run is not None and self._run.process.poll() is None:
            if time.time() - max(began, last_batch(self._rig.home)) > _PATIENCE_SECONDS:
                self.complaints.append(f"an undisturbed run began no batch for {_PATIENCE_SECONDS:.0f} s")
                self.kill()
            time.sleep(_LOOK_SECONDS)
        return self._note_end()

    def _note_end(self) -> int | None:
        """Count how the last run ended and complain when no run may end so; returns its exit code."""
        run, self._run = self._run, None
        if run is None:
            return None
        code = run.process.returncode
        with self._log.open("rb") as log:
            log.seek(run.output_at)
            lines = log.read().decode(errors="replace").splitlines()
        signalled = {signal.SIGKILL: "killed", signal.SIGTERM: "ended"}
        end = signalled[run.signalled] if run.signalled else {0: "succeeded", 1: "failed"}.get(code, "wrong")
        self.ends[end] += 1
        # Neither Python's own trace nor Spark's, which is JSON, is for those who run it.
        traces = [line for line in lines if line.startswith(("Traceback", "{"))]
        if end == "wrong" or traces:
            self.complaints.append(f"a run ended with exit code {code}: {(traces or lines or ['no output'])[-1]}")
        return code


class Gremlin:
    """Makes faults happen at random moments and heals those that do not heal by themselves; `tend` is called often.

    The same generator draws the same faults; what they meet is a matter of timing. One that meets nothing is not counted.
    """

    def __init__(self, rig: Rig, operator: Operator, chance: random.Random) -> None:
        self.faults: Counter[Fault] = Counter()
        self._rig = rig
        self._operator = operator
        self._chance = chance
        self._strike_at = time.monotonic() + chance.uniform(*_PAUSE_SECONDS)
        self._set_back_at = time.time()
        self._healing: dict[NatsServer, tuple[float, Callable[[], object]]] = {}

    def tend(self) -> None:
        """Heal what is due, and strike when it is time to."""
        now = time.monotonic()
        self.heal(until=now)
        if now >= self._strike_at:
            fault = self._chance.choice(list(Fault))
            self._strike_at = now + self._chance.uniform(*_PAUSE_SECONDS)
            if fault in _SETBACKS and last_batch(self._rig.home) < self._set_back_at:
                return
            if not self._strike(fault):
                self._operator.note(f"{fault}: there is none")
                return
            self.faults[fault] += 1
            self._operator.note(fault)
            if fault in _SETBACKS:
                self._set_back_at = time.time()

    def heal(self, until: float = float("inf")) -> None:
        """Bring back the servers that are due: all, unless a time is given."""
        for server, (when, heal) in list(self._healing.items()):
            if when <= until:
                del self._healing[server]
                heal()

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

    def _kill_of_engine(self, program: str) -> bool:
        """Kill one of the engine's processes, whose command names the program: the JVM, or one of its Python workers."""
        engine = engine_status(self._rig.home)
        try:
            family = psutil.Process(engine.pid).children(recursive=True) if engine else []
            self._chance.choice([one for one in family if _runs(one, program)]).kill()
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


def _runs(process: psutil.Process, program: str) -> bool:
    """Tell whether a process's command names a program; one that has ended runs nothing."""
    try:
        return any(program in argument for argument in process.cmdline()[:3])
    except psutil.NoSuchProcess:
        return False
