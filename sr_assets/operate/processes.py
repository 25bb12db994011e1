"""Signals and children: what Ctrl-C and SIGTERM do to us, and how what we started is ended, also when we are killed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# The exit code of what a signal ended, as shells have it for Ctrl-C.
INTERRUPTED: Final = 130
_STOP_SECONDS: Final = 60.0


def start_leashed(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a child that leads a process group and, if it calls `end_with_parent`, never outlives us."""
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def end_with_parent() -> None:
    """Kill this process and its group when its parent is gone: SIGKILL leaves nobody to stop the children.

    The parent holds the other end of our stdin, and says nothing there; the kernel closes it however the parent ends.
    """

    def watch() -> None:
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="leash", daemon=True).start()


def stop_groups(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask children that lead process groups to end, with all that they started, and wait; after a minute they are killed."""
    for child in children:
        _signal_group(child, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))
        # The leader is gone or hangs; what is left of its group ends now.
        _signal_group(child, signal.SIGKILL)
        child.wait()


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


@contextlib.contextmanager
def interrupted_in_order() -> Iterator[None]:
    """Let SIGTERM end what is inside as Ctrl-C does, so that everything is stopped in order.

    SIGINT gets a handler too: a shell's `&` has it ignored, our children would inherit that, and Dagster takes what it finds
    there for SIGTERM as well.
    """

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    # Dagster's storage, interrupted while it closes a connection, would say so with a trace before it passes that on.
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
    before = {one: signal.signal(one, interrupt) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextlib.contextmanager
def noticed_signals() -> Iterator[Callable[[], bool]]:
    """Tell whether SIGTERM or SIGINT arrived meanwhile: Dagster, while it executes, has their handlers and ends but the run."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def arrived() -> bool:
        try:
            return not {signal.SIGTERM, signal.SIGINT}.isdisjoint(os.read(reader, 4096))
        except BlockingIOError:
            return False

    try:
        yield arrived
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
