"""A command on a terminal of its own, for tests of what only a terminal shows: bars, questions, tables of its width."""

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path

import pyte

from sr_assets_tests.forks import Forked
from sr_assets_tests.rig import wait_until


class Terminal:
    """A command with stderr on a terminal, stdout there too unless `piped`, and stdin if it asks questions."""

    def __init__(
        self,
        *arguments: str,
        size: tuple[int, int] = (160, 40),
        term: str = "xterm",
        piped: bool = False,
        asks: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._ours, theirs = pty.openpty()
        self._columns, self._rows = size
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", self._rows, self._columns, 0, 0))
        self.shown = ""
        self._answered = 0
        self.process = Forked(
            [sys.executable, "-m", "sr_assets", *arguments],
            stdin=theirs if asks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else theirs,
            stderr=theirs,
            env={**(os.environ if environ is None else environ), "TERM": term},
            text=True,
        )
        os.close(theirs)

    def read(self, text: str = "") -> str:
        """Return the output until it contains a text after the last answer, by default until the command's end."""
        # Reading an empty terminal whose other end is closed raises OSError.
        with contextlib.suppress(OSError):
            while (not text or text not in self.shown[self._answered :]) and (part := os.read(self._ours, 1 << 16)):
                self.shown += part.decode(errors="replace")
        return self.shown[self._answered :]

    def answer(self, question: str, line: str) -> str:
        """Wait for a question and type a line; return the output since the last answer."""
        output = self.read(question)
        assert question in output, output
        self._answered = len(self.shown)
        os.write(self._ours, line.encode())
        return output

    def interrupt(self, question: str) -> None:
        """Send SIGINT while the command waits for an answer: Python forgets one that arrives directly before it reads."""
        assert question in self.read(question), self.shown
        calls = Path(f"/proc/{self.process.pid}/syscall")
        # The first argument is the number of the file that it reads.
        wait_until(lambda: calls.read_text().split()[1:2] == ["0x0"], "the command to read its stdin")
        self.process.send_signal(signal.SIGINT)

    def screen(self, end: int | None = None) -> list[str]:
        """Return the lines that the terminal shows after the output, or its first characters, without blanks at the end."""
        screen = pyte.Screen(self._columns, self._rows)
        pyte.Stream(screen).feed(self.shown[:end])
        return "\n".join(line.rstrip() for line in screen.display).rstrip().splitlines()

    def end(self) -> tuple[int, str]:
        """Read to the command's end, and return its exit code and its output in the pipe."""
        self.read()
        os.close(self._ours)
        output, _ = self.process.communicate()
        return self.process.returncode, output
