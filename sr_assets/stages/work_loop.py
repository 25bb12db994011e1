"""The work loop: one kind of work of a stream, with separate retries, pauses and failure.

Watching and copying are separate loops, so that an error of a target delays only copies.
"""

import logging
import random
import threading
from collections import Counter as Counts
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.state.stream_tables import Counter
from sr_assets.domain.backoff import backoff_seconds
from sr_assets.domain.errors import (
    ConfigurationError,
    EngineLostError,
    ExecutorLostError,
    LeadershipLostError,
    SrAssetsError,
    TransientError,
    cannot_write,
)
from sr_assets.stages.report import Stage, StreamReport

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 30.0


class WorkLoop:
    """Runs the steps of one kind of work and handles their errors.

    `stages` are the loop's, `folder` is the site's. `on_error` records an error, or None after recovery; `on_lost` drops
    the loop's connections. `guard` raises LeadershipLostError if another member may lead: the loop then ends without a
    failure.

    `reached`: a step has succeeded in this run, so a later error may be temporary. `failure` is one line after the loop
    gave up, `error` one line while it retries. `due_at` (monotonic seconds) is the time of the next step: later after
    an error, or when the loop has caught up.
    """

    def __init__(
        self,
        report: StreamReport,
        folder: Path,
        stages: frozenset[Stage],
        *,
        on_error: Callable[[str | None], None],
        on_lost: Callable[[], None],
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        self._report, self._folder, self._stages = report, folder, stages
        self._on_error, self._on_lost, self._guard = on_error, on_lost, guard
        self.reached = False
        self.error: str | None = None
        self.failure: str | None = None
        self.retries = 0
        self._counts: Counts[Counter] = Counts()
        # Whether a connection was lost, and no step has succeeded since.
        self._disconnected = False
        self.due_at = 0.0

    @property
    def due(self) -> bool:
        """Whether the next step is due."""
        return self.failure is None and times.monotonic() >= self.due_at

    def rest(self, until: float) -> None:
        """Delay the next step until a time (monotonic seconds), so that messages form one batch. An error has its own pause."""
        if self.error is None:
            self.due_at = until

    def take_counts(self) -> Mapping[Counter, float]:
        """Return the failed steps, and the lost and reopened connections, since the last call."""
        counts, self._counts = self._counts, Counts()
        return counts

    def attempt(self, step: Callable[[], bool], *, final: Callable[[], bool]) -> bool:
        """Do one step; return whether there was work. A TransientError is a failure if `final` returns true."""
        try:
            return self._attempt(step, final)
        except LeadershipLostError as error:
            self.failure, self.error = str(error), None
            logger.warning("%s", error)
            return False

    def _attempt(self, step: Callable[[], bool], final: Callable[[], bool]) -> bool:
        try:
            busy = step()
        except LeadershipLostError:
            raise
        except TransientError as error:
            self._guard()
            # A lost engine is restarted and a lost executor replaced, regardless of the servers' responses.
            if isinstance(error, (EngineLostError, ExecutorLostError)):
                self.reached = True
            else:
                self._note_disconnected()
            self._retry_or_fail(_line(self._report.stream.label, error), final=final())
            return False
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  a defect that one stream's data reveals must not fail other streams
            if isinstance(error, SrAssetsError):
                self._guard()  # Spark hides that a task was not allowed to write
            self._fail_by(error)
            return False
        if self.retries:
            logger.info("%s: recovered after %d failed attempts", self._report.stream.label, self.retries)
        self._counts[Counter.RECONNECTIONS] += self._disconnected
        self._disconnected = False
        if self.retries or not self.reached:
            # Clear the previous run's error now, not when this run ends.
            self._on_error(None)
        self.reached = True
        self.retries, self.error = 0, None
        return busy

    def finish(self, step: Callable[[], None]) -> None:
        """Do the final work of a run, the compaction of the history; an error is a failure."""
        try:
            step()
        except (LeadershipLostError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001  as above
            self._fail_by(error, frozenset({Stage.NODE_SNAPSHOTS}))

    def outcome(self, before: str | None) -> str | None:
        """Return the error to record at the end of a run; the recorded one, `before`, holds until a step succeeds."""
        return self.failure or self.error or (None if self.reached else before)

    def _note_disconnected(self) -> None:
        """Count an error of a connection, and the connections that it closes unless an earlier error did."""
        self._counts[Counter.CONNECTION_ERRORS] += 1
        self._counts[Counter.CONNECTIONS_CLOSED] += not self._disconnected
        self._disconnected = True

    def _retry_or_fail(self, line: str, *, final: bool) -> None:
        # A connection that a server has dropped may look alive, so all are reopened.
        self._on_lost()
        if final:
            self._fail(line)
            return
        self._counts[Counter.ERRORS] += 1
        self.error = line
        self.retries += 1
        pause_seconds = backoff_seconds(
            self.retries, first_seconds=_FIRST_PAUSE_SECONDS, longest_seconds=_LONGEST_PAUSE_SECONDS
        )
        self.due_at = times.monotonic() + pause_seconds * random.uniform(0.5, 1.0)  # noqa: S311  jitter, not a secret
        logger.warning("%s; attempt %d in %.1f s", line, self.retries + 1, self.due_at - times.monotonic())
        if self.retries == 1:
            self._on_error(line)

    def _fail_by(self, error: Exception, stages: frozenset[Stage] | None = None) -> None:
        """Fail with one line about an error in these stages, by default the loop's."""
        label = self._report.stream.label
        self._report.misconfigured |= isinstance(error, ConfigurationError)
        if isinstance(error, SrAssetsError):
            self._fail(_line(label, error), stages)
        elif isinstance(error, OSError):
            self._fail(f"{label}: {cannot_write(error.filename or self._folder, error)}", stages)
        else:
            logger.error("%s: unexpected error", label, exc_info=error)
            self._fail(f"{label}: {type(error).__name__}: {str(error).partition(chr(10))[0]}", stages)

    def _fail(self, failure: str, stages: frozenset[Stage] | None = None) -> None:
        self._counts[Counter.ERRORS] += 1
        # The first one says why the loop ended.
        self.failure, self.error = self.failure or failure, None
        self._report.failures.append(failure)
        self._report.failed |= self._stages if stages is None else stages
        logger.error("%s", failure)


def _line(label: str, error: SrAssetsError) -> str:
    return str(error) if label in str(error) else f"{label}: {error}"


class BackgroundSteps:
    """Runs steps in a background thread, one at a time; polling it never blocks. `woken` is set whenever a step ends.

    The thread is a daemon: a step that waits for a frozen process must not keep this process alive.
    """

    def __init__(self, name: str, woken: threading.Event) -> None:
        self._name, self._woken = name, woken
        self._thread: threading.Thread | None = None
        self._busy = False
        self._error: BaseException | None = None

    @property
    def running(self) -> bool:
        """Whether a step is active."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_result(self) -> bool:
        """Whether a step is active, or its result has not been taken yet."""
        return self._thread is not None

    def start(self, step: Callable[[], bool]) -> None:
        """Start a step; the previous one must have ended and its result have been taken."""

        def run() -> None:
            try:
                self._busy = step()
            except BaseException as error:  # noqa: BLE001  re-raised by `take`
                self._error = error
            finally:
                self._woken.set()

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def take(self) -> bool | None:
        """Return the result of the finished step, or None; raises the step's exception."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._busy

    def join(self, seconds: float) -> bool:
        """Wait for the active step, at most `seconds`; return whether it has ended."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.running
