"""The runs of a soak: repeated runs of a site, their progress and their ends."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psutil

from sr_assets.adapters.state.status_file import read_status
from sr_assets_tests.faults.rig import start_run

if TYPE_CHECKING:
    import random
    import subprocess
    from collections.abc import Mapping
    from pathlib import Path

    from sr_assets_tests.rig import Rig

#: The maximum duration of a run without progress and without faults.
_PATIENCE_SECONDS: Final = 150.0
_LOOK_SECONDS: Final = 1.0


class Progress:
    """The progress of a site: `moved` returns whether it has started a batch of copies or committed one since the last
    call.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._last: object = None
        self.moved()

    def moved(self) -> bool:
        """Read the current progress and store it as the last one."""
        before, self._last = self._last, (self.positions(), self._batches())
        return before != self._last

    def positions(self) -> dict[str, int]:
        """Return the next unread sequence of each stream."""
        return {
            stream: status.next_sequence
            for folder in self._home.glob("sites/*")
            for stream, status in read_status(folder).streams.items()
        }

    def _batches(self) -> list[float]:
        return sorted(file.stat().st_mtime for file in self._home.glob("sites/*/writers/*/batch"))


@dataclass(slots=True)
class _Run:
    """An active run: its arguments, the start of its output in the log, and the signal that we sent."""

    process: subprocess.Popen[bytes]
    mode: str
    output_at: int
    signalled: signal.Signals | None = None


class Operator:
    """Runs a site repeatedly, in one of the modes, like an operator; call `tend` often.

    `ends` counts the ends of runs. `complaints` names the invalid ones: an exit code other than 0 or 1 without a signal
    of ours, or a traceback. The output is in `runs.log`.
    """

    def __init__(
        self,
        rig: Rig,
        chance: random.Random,
        *,
        modes: tuple[str, ...] = ("--once", "--follow"),
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._modes, self._environ = modes, environ
        self.ends: Counter[str] = Counter()
        self.complaints: list[str] = []
        self._rig = rig
        self._log = rig.home / "runs.log"
        self._chance = chance
        self._run: _Run | None = None

    def tend(self) -> None:
        """Start the next run if the last one has ended."""
        if self._run is not None and self._run.process.poll() is None:
            return
        self._note_end()
        self._begin(self._chance.choice(self._modes))

    def kill(self) -> bool:
        """Kill the active run with all its processes except the engine; return whether there was one."""
        return self._signal(signal.SIGKILL)

    def end(self) -> bool:
        """Interrupt the active run; return whether there was one."""
        return self._signal(signal.SIGTERM)

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the active run: the command and its children, without the engine."""
        try:
            if not self._run:
                return []
            run = psutil.Process(self._run.process.pid)
            # The parent of the sites is the original of `operate/forking.py`.
            originals = run.children()
            return [run, *originals, *(site for original in originals for site in original.children())]
        except psutil.NoSuchProcess:
            return []

    def kill_and_wait(self) -> None:
        """Kill the active run, if there is one, and wait until its children have ended."""
        processes = self.processes()
        self.kill()
        if self._run is not None:
            self._run.process.wait()
        psutil.wait_procs(processes, timeout=_PATIENCE_SECONDS)

    def finish(self) -> None:
        """Wait for the end of the active run; interrupt it if it follows."""
        if self._run is not None and self._run.mode == "--follow":
            self.end()
        self._await_end()

    def drain(self) -> bool:
        """Run once to the end; return whether the run succeeded."""
        self._begin("--once")
        if self._await_end() == 0:
            return True
        said = self._log.read_text(errors="replace").splitlines()
        self.complaints.append(f"an undisturbed run did not succeed: {said[-1]}")
        return False

    def note(self, text: str) -> None:
        """Write other events into the log, between the output of the runs."""
        with self._log.open("a") as log:
            log.write(f"--- {time.strftime('%H:%M:%S')} {text}\n")

    def _begin(self, mode: str) -> None:
        self.note(f"run {mode}")
        with self._log.open("ab") as log:
            output_at = log.tell()
            self._run = _Run(start_run(self._rig, mode=mode, log=log, environ=self._environ), mode, output_at)

    def _signal(self, number: signal.Signals) -> bool:
        if self._run is None or self._run.process.poll() is not None:
            return False
        self._run.process.send_signal(number)
        self._run.signalled = number
        return True

    def _await_end(self) -> int | None:
        """Wait for the active run while it makes progress; return its exit code, or None without a run."""
        progress, moved_at = Progress(self._rig.home), time.monotonic()
        while self._run is not None and self._run.process.poll() is None:
            if progress.moved():
                moved_at = time.monotonic()
            if time.monotonic() - moved_at > _PATIENCE_SECONDS:
                self.complaints.append(f"an undisturbed run did nothing for {_PATIENCE_SECONDS:.0f} s")
                self.kill()
            time.sleep(_LOOK_SECONDS)
        return self._note_end()

    def _note_end(self) -> int | None:
        """Count the end of the last run, and complain if it is invalid; return its exit code."""
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
        # Users must not see a traceback of Python or of Spark, which is JSON.
        traces = [line for line in lines if line.startswith(("Traceback", "{"))]
        if end == "wrong" or traces:
            self.complaints.append(f"a run ended with exit code {code}: {(traces or lines or ['no output'])[-1]}")
        return code
