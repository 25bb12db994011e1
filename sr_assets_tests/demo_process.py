"""The demo as a separate process, for its tests, the browser test and the picture in `docs`.

All its processes inherit a mark in their environment, which identifies them independently of their parents.
"""

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from sr_assets_tests.marked import marked
from sr_assets_tests.rig import PATIENCE_SECONDS, wait_until

_MARK = "SR_ASSETS_TEST_DEMO"
_STOP_SECONDS = 120.0


class DemoProcess:
    """`sr-assets demo` with some arguments, inside `with`; `said` is its output on stderr."""

    def __init__(self, folder: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        self._mark = uuid.uuid4().hex
        self._arguments = arguments
        self._environ = {**(os.environ if environ is None else environ), _MARK: self._mark, "TMPDIR": str(folder)}
        self._out, self._err = folder / "stdout", folder / "stderr"

    def __enter__(self) -> Self:
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sr_assets", "demo", *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self._environ,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        finally:
            for process in self.left():
                process.kill()

    @property
    def written(self) -> str:
        """Its output on stdout."""
        return self._out.read_text()

    @property
    def errors(self) -> str:
        """Its output on stderr."""
        return self._err.read_text()

    def await_output(self, text: str) -> None:
        """Wait until its output on stdout or stderr contains a text."""
        self.await_condition(lambda: text in self.written + self.errors, text)

    def await_condition(self, condition: Callable[[], bool], awaited: str) -> None:
        """Wait for a condition while the demo runs, longer than for other processes: it starts a dozen."""
        wait_until(lambda: condition() or self.process.poll() is not None, awaited, 2 * PATIENCE_SECONDS, every=0.1)
        assert condition(), f"the demo ended: {self.written}{self.errors}"

    def left(self) -> list[psutil.Process]:
        """Return every live process of this demo, without zombies."""
        return marked(_MARK, self._mark)
