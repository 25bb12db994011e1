"""Progress bars on a real pseudo-terminal."""

import contextlib
import io
import os
import pty
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sr_assets.adapters.progress_lines import LongWork
from sr_assets.operate.bars import progress_bars


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Make stderr a terminal; the list receives its output at the end of the block."""
    ours, theirs = pty.openpty()
    sent: list[str] = []
    with (
        os.fdopen(ours, "rb", buffering=0) as reading,
        os.fdopen(theirs, "w") as stderr,
        monkeypatch.context() as patch,
    ):
        patch.setattr(sys, "stderr", stderr)
        for variable, value in (("TERM", "xterm"), ("COLUMNS", "120")):
            patch.setenv(variable, value)
        patch.delenv("NO_COLOR", raising=False)
        yield sent
        # The kernel forwards output asynchronously and reports the end after all writers closed.
        stderr.close()
        sent.append(b"".join(_all_of(reading)).decode())


def _all_of(reading: io.FileIO) -> Iterator[bytes]:
    with contextlib.suppress(OSError):
        while some := reading.read(1 << 16):
            yield some


def test_terminal_shows_a_bar_until_the_work_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal(monkeypatch) as sent, progress_bars(), LongWork("reading stream [S]", 1_000) as work:
        work.reached(100)
        work.reached(250)
        print("a result")  # noqa: T201  a command's output during the work
    assert "reading stream [S]" in sent[0]
    assert "250/1000" in sent[0]
    assert "/s" in sent[0]
    assert capsys.readouterr().out == "a result\n"


def test_file_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress_bars(), LongWork("reading", 1_000) as work:
        work.reached(100)
    assert not stderr.getvalue()
