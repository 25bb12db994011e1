"""Signals and child processes: what Ctrl-C and SIGTERM do to us, and how our children end, also when we are killed.

Not here: which processes there are (`services`, `runs`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

# The exit code after a signal, as shells have it for Ctrl-C.
INTERRUPTED: Final = 130
_STOP_SECONDS: Final = 60.0
# How long after an interrupt that had no effect it is raised again.
_AGAIN_SECONDS: Final = 0.05


def child_environment() -> dict[str, str]:
    """Return the environment of our children and of theirs: nothing is imported from the current folder.

    `python -m` and multiprocessing look there first, and anybody may have left a module in it.
    """
    return {**os.environ, "PYTHONSAFEPATH": "1"}


def start_child(command: Sequence[str], errors: int | None = None) -> subprocess.Popen[bytes]:
    """Start a child that leads a process group and, if it calls `end_with_parent`, never outlives us.

    `errors` is the descriptor that it has as stderr; None: ours.
    """
    environ = child_environment()
    return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors, start_new_session=True, env=environ)


def end_with_parent() -> None:
    """Kill this process and its group when its parent has ended: after SIGKILL nothing else stops the children.

    The parent holds the other end of our stdin and writes nothing; the kernel closes it however the parent ends.
    """

    def watch() -> None:
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def stop_groups(children: Sequence[subprocess.Popen[bytes]], *, again_seconds: float = _STOP_SECONDS) -> None:
    """Ask children that lead process groups to end, with all that they started, and wait; kill them after a minute.

    One that has not ended is asked again every `again_seconds`: a process that still imports its libraries may lose the
    exception by which a signal ends it.
    """
    for child in children:
        _signal_group(child, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    for child in children:
        while child.poll() is None and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(min(left, again_seconds))
                break
            child.terminate()
        # The leader has ended or hangs; the rest of its group ends now.
        _signal_group(child, signal.SIGKILL)
        child.wait()


def _signal_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


@contextlib.contextmanager
def signals_as_interrupt(*signals: signal.Signals) -> Iterator[Callable[[], None]]:
    """Raise KeyboardInterrupt inside the block for these signals, by default SIGTERM and SIGINT.

    Yields a function that has them ignored from then on. SIGINT gets a handler too: a shell's `&` has it ignored, our
    children would inherit that, and Dagster uses SIGINT's handler for SIGTERM as well. A signal that arrives where Python
    loses the exception (a weak reference's callback) or keeps it (a library's import: the process would end with
    SIGINT's code in any case) is raised a moment later.
    """
    handled = signals or (signal.SIGTERM, signal.SIGINT)

    def interrupt(_signal: int, frame: FrameType | None) -> None:
        if _importing(frame):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
        else:
            raise KeyboardInterrupt

    def raise_again(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
        else:
            hook(unraisable)

    def ignore() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    # Dagster's storage, interrupted while it closes a connection, would log a trace before it passes the interrupt on.
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
    hook, sys.unraisablehook = sys.unraisablehook, raise_again
    before = {number: signal.signal(number, interrupt) for number in (*handled, signal.SIGALRM)}
    try:
        yield ignore
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


def _importing(frame: FrameType | None) -> bool:
    """Return whether a frame is within an import."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def recorded_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGTERM or SIGINT arrived inside the block.

    While Dagster executes it has handlers of its own, which end the run and not the process.
    """
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
