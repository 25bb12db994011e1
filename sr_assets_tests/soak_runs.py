"""The runs of a soak: repeated runs of a site, their progress and their ends."""

from __future__ import annotations

import signal
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.state.status_file import read_status
from sr_assets_tests.faults.rig import start_run

if TYPE_CHECKING:
    import random
    import subprocess
    from pathlib import Path

    from sr_assets_tests.rig import Rig

#: How long a run may go on without doing anything once nothing disturbs it any more.
_PATIENCE_SECONDS: Final = 150.0
_LOOK_SECONDS: Final = 1.0


class Progress:
    """How far a site is: `moved` tells whether it has begun a batch of copies or committed a read one since the last time."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._last: object = None
        self.moved()

    def moved(self) -> bool:
        """Look again, and take what is found for the last time."""
        before, self._last = self._last, (self.positions(), self._batches())
        return before != self._last

    def positions(self) -> dict[str, int]:
        """Return the next sequence of each stream that is to be read."""
        return {
            stream: status["next_sequence"]
            for folder in self._home.glob("sites/*")
            for stream, status in read_status(folder).get("streams", {}).items()
        }

    def _batches(self) -> list[float]:
        return sorted(file.stat().st_mtime for file in self._home.glob("sites/*/writers/*/batch"))


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

    def finish(self) -> None:
        """See the run under way end, by itself unless it follows."""
        if self._run is not None and self._run.mode == "--follow":
            self.end()
        self._await_end()

    def drain(self) -> bool:
        """Let a run take what there is to its end; returns whether it succeeded."""
        self._begin("--once")
        if self._await_end() == 0:
            return True
        said = self._log.read_text(errors="replace").splitlines()
        self.complaints.append(f"an undisturbed run did not succeed: {said[-1]}")
        return False

    def note(self, text: str) -> None:
        """Write down what happens besides, between what the runs say."""
        with self._log.open("a") as log:
            log.write(f"--- {time.strftime('%H:%M:%S')} {text}\n")

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
