"""Signals and child processes: handling of Ctrl-C and SIGTERM, and children that never outlive their parent."""

import atexit
import contextlib
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from types import FrameType, TracebackType
from typing import Final, NoReturn, Protocol, Self, TypeVar

from sr_assets.adapters import times
from sr_assets.domain.backoff import backoff_seconds

# The exit code of shells after Ctrl-C.
INTERRUPTED: Final = 130
_STOP_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.02
_STEP_SECONDS: Final = 0.5
# The pause before an interrupt without effect is raised again.
_AGAIN_SECONDS: Final = 0.05
#: The RuntimeError by which DuckDB replaces the exception of a signal during a query, as soon as its other threads have ended.
_INTERRUPTED_QUERY: Final = "Query interrupted"
#: The pause before an ended process is started again doubles with each end, unless the process has run for a while.
_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0
_HEALTHY_SECONDS: Final = 60.0
#: More descriptors than anything here needs; a container may allow a billion, which some programs close one by one.
_MOST_DESCRIPTORS: Final = 65_536

T = TypeVar("T")


class Restarts:
    """When to start a process again that should run for ever."""

    def __init__(self) -> None:
        self._failures = 0
        self.note_start()

    def note_start(self) -> None:
        """Note that the process starts now."""
        self._began = times.monotonic()

    def pause_seconds(self) -> float:
        """Note that the process has ended, and return the pause before its next start."""
        self._failures = 1 if times.monotonic() - self._began > _HEALTHY_SECONDS else self._failures + 1
        return backoff_seconds(
            self._failures, first_seconds=_FIRST_PAUSE_SECONDS, longest_seconds=_LONGEST_PAUSE_SECONDS
        )


def end_of(code: int) -> str:
    """Say how a process ended."""
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


def allow_descriptors() -> None:
    """Let this process and its children open as many files and connections as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # A system may allow less than its hard limit says.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def child_environment() -> dict[str, str]:
    """Return an environment in which children import nothing from the current folder.

    By default `python -m` and multiprocessing search it first, and it may contain another user's modules.
    """
    return {**os.environ, "PYTHONSAFEPATH": "1"}


def end_process(code: int) -> NoReturn:
    """End this process as the interpreter does, but leave its memory to the system.

    Releasing each object takes as long as a short command. An error of the last write is lost, so flush what must be written.
    """
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
        atexit._run_exitfuncs()  # noqa: SLF001
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def end_with_parent() -> None:
    """Kill this process and its group after the parent has ended, even by SIGKILL.

    The parent holds the other end of stdin and writes nothing; the kernel closes it at the parent's end.
    """

    def watch() -> None:
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


class Child(Protocol):
    """A child process that leads a process group; a part of `Popen`."""

    pid: int

    def __enter__(self) -> Self:
        """Return self."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Close the pipes, and wait for the end of the process."""

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""

    def wait(self) -> int:
        """Wait for the end of the process and return the exit code."""

    def terminate(self) -> None:
        """Send SIGTERM to the process, unless it has ended."""


def stop_groups(children: Sequence[Child], *, again_seconds: float = _STOP_SECONDS) -> None:
    """Terminate process groups by their leaders, wait, and kill them after a minute; close the leaders' pipes.

    SIGTERM is repeated every `again_seconds`: a process that is still importing libraries may lose the exception that a
    signal raises.
    """
    for child in children:
        signal_group(child, signal.SIGTERM)
    began = times.monotonic()
    again_at, left = began + again_seconds, list(children)
    while left:
        hangs, now = times.monotonic() >= began + _STOP_SECONDS, times.monotonic()
        for child in list(left):
            if child.poll() is not None or hangs:
                # Now and not later: another process may get the id of a group that has ended.
                signal_group(child, signal.SIGKILL)
                # The end of the block waits for it and closes its pipes.
                with child:
                    left.remove(child)
            elif now >= again_at:
                child.terminate()
        if now >= again_at:
            again_at = now + again_seconds
        if left:
            times.sleep(_POLL_SECONDS)


def signal_group(child: Child, number: signal.Signals) -> None:
    """Send a signal to the group that a child leads, if any of its processes is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


@contextlib.contextmanager
def signals_as_interrupt(*signals: signal.Signals) -> Iterator[Callable[[], None]]:
    """Raise KeyboardInterrupt inside the block for these signals, by default SIGTERM and SIGINT.

    While that exception is handled, as in a `finally`, more signals have no effect: they would cut the cleaning up short. Yields
    a function that makes the process ignore them; the first signal may interrupt even that. SIGINT needs a handler too: with a
    shell's `&` it is ignored, children would inherit that, and Dagster uses SIGINT's handler for SIGTERM. If Python would lose
    the exception (in a weak reference's callback) or hold it (in an import), it is raised a moment later.
    """
    handled = signals or (signal.SIGTERM, signal.SIGINT)

    def interrupt(_signal: int, frame: FrameType | None) -> None:
        if _importing(frame):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
        elif not _handling_interrupt():
            raise KeyboardInterrupt

    def raise_again(unraisable: "sys.UnraisableHookArgs") -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
        else:
            hook(unraisable)

    def ignore() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    # SQLAlchemy logs a trace if it is interrupted while it closes a connection.
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
    hook, sys.unraisablehook = sys.unraisablehook, raise_again
    before = {number: signal.signal(number, interrupt) for number in (*handled, signal.SIGALRM)}
    try:
        with interrupted_queries():
            yield ignore
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


@contextlib.contextmanager
def interrupted_queries() -> Iterator[None]:
    """Raise KeyboardInterrupt instead of the error into which DuckDB turns it; `signals_as_interrupt` does so at its end."""
    try:
        yield
    except RuntimeError as error:
        if str(error) != _INTERRUPTED_QUERY:
            raise
        raise KeyboardInterrupt from None


def await_result(future: futures.Future[T]) -> T:
    """Wait for a future in the main thread and return its result; a signal interrupts the wait.

    Of two signals that arrive together, the kernel may give both to another thread. Python calls their handlers in the main
    thread, but does not wake it, so the wait has short steps.
    """
    while not futures.wait((future,), _STEP_SECONDS).done:
        pass
    return future.result()


def _handling_interrupt() -> bool:
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def recorded_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGTERM or SIGINT has arrived inside the block.

    Dagster's own handlers, active during execution, end the run but not the process.
    """
    received: set[int] = set()
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def arrived() -> bool:
        with contextlib.suppress(BlockingIOError):
            received.update(os.read(reader, 4096))
        return not received.isdisjoint({signal.SIGTERM, signal.SIGINT})

    try:
        yield arrived
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
