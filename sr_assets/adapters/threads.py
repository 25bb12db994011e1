"""Daemon threads: `in_background` does one piece of work; a `BackgroundThread` is long-lived, and no error ends it.

An error is logged, and the body starts again after a pause. A body is a generator. It yields the pause in seconds before its next
turn, and returns to end the thread; a context manager inside it is closed at every end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import closing
from typing import Final, NamedTuple, Self, TypeVar

from sr_assets.adapters import times
from sr_assets.domain.backoff import backoff_seconds
from sr_assets.domain.errors import SrAssetsError

logger = logging.getLogger(__name__)

Body = Callable[[], Generator[float]]
Result = TypeVar("Result")

_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0
_JOIN_SECONDS: Final = 10.0
_guard = threading.Lock()


class Failure(NamedTuple):
    """Since when a thread has been failing (unix seconds), and the last error in one line."""

    since: float
    problem: str


_failing: dict[BackgroundThread, Failure] = {}


def failing_threads() -> dict[str, Failure]:
    """Return the threads of this process that fail, by name."""
    with _guard:
        return {thread.name: failure for thread, failure in _failing.items()}


class BackgroundThread:
    """A daemon thread that repeats a body until `stop`; a context manager.

    The pause before the body starts again doubles with each failure up to `longest_pause_seconds`. The thread has recovered
    when its body has worked for longer than the last pause.
    """

    def __init__(
        self,
        name: str,
        body: Body,
        *,
        longest_pause_seconds: float = _LONGEST_PAUSE_SECONDS,
        join_seconds: float | None = _JOIN_SECONDS,
    ) -> None:
        """`join_seconds` is how long the end of a `with` block waits for the current turn; None: to its end."""
        self.name = name
        self._body, self._longest_pause_seconds, self._join_seconds = body, longest_pause_seconds, join_seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._failures = 0
        self._pause_seconds = 0.0
        self._logged: object = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(self._join_seconds)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_ending(self) -> bool:
        """Whether the body should end its turn early."""
        return self._ended.is_set()

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if the system allows no more threads."""
        self._thread.start()

    def stop(self, join_seconds: float | None = None) -> None:
        """End the body at its next pause, and wait for that: without `join_seconds`, as long as it takes."""
        self._ended.set()
        self.join(join_seconds)

    def join(self, seconds: float | None = None) -> None:
        """Wait until the body has ended, at most `seconds`."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._ended.wait(self._pause_seconds):
            try:
                self._repeat()
                break
            except Exception as error:  # noqa: BLE001  the reason for this module
                self._note_failure(error)
        self._forget()

    def _repeat(self) -> None:
        began = times.monotonic()
        with closing(self._body()) as turns:
            for pause_seconds in turns:
                if self._failures and times.monotonic() - began > self._pause_seconds:
                    self._note_recovery()
                if self._ended.wait(pause_seconds):
                    return

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        self._pause_seconds = backoff_seconds(
            self._failures,
            first_seconds=min(_FIRST_PAUSE_SECONDS, self._longest_pause_seconds),
            longest_seconds=self._longest_pause_seconds,
        )
        problem = str(error).strip().partition("\n")[0]
        if not isinstance(error, SrAssetsError):
            problem = f"{type(error).__name__}: {problem}"
        with _guard:
            _failing[self] = Failure(_failing[self].since if self in _failing else times.time(), problem)
        # The names of temporary files differ.
        cause = type(error), getattr(error, "errno", None) or problem
        if cause != self._logged:
            self._logged = cause
            line = f"{self.name}: {problem}; retrying until it works"
            if isinstance(error, SrAssetsError | OSError):
                logger.warning("%s", line)
            else:
                logger.error("%s", line, exc_info=error)

    def _note_recovery(self) -> None:
        logger.info("%s: works again after %d failures", self.name, self._failures)
        self._failures, self._pause_seconds, self._logged = 0, 0.0, None
        self._forget()

    def _forget(self) -> None:
        with _guard:
            _failing.pop(self, None)


def in_background(name: str, work: Callable[[], Result], future: Future[Result] | None = None) -> Future[Result]:
    """Do some work in a thread, and return its future, a new one by default.

    The thread is a daemon: work that waits for a frozen process must not keep this process alive. If a signal's exception
    interrupts the start, the future is cancelled, unless the work has begun.
    """
    promised: Future[Result] = Future() if future is None else future

    def run() -> None:
        if not promised.set_running_or_notify_cancel():
            return
        try:
            promised.set_result(work())
        except BaseException as error:  # noqa: BLE001  raised by the future's `result`
            promised.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except BaseException:
        promised.cancel()
        raise
    return promised
