"""A lane: one kind of work of a stream that is tried again by itself, ever more slowly, and gives up by itself.

Watching and copying are lanes of their own, so that trouble with a target delays copies and nothing else. Here: what a
failure means, and a lane whose steps run beside the others in a thread. Not here: the work.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import TYPE_CHECKING, Final

from sr_assets.domain.errors import (
    ConfigurationError,
    EngineLostError,
    SrAssetsError,
    TransientError,
    cannot_write,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sr_assets.stages.report import Stage, StreamReport

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 30.0


class Lane:
    """Runs the steps of one kind of work and weighs what goes wrong in them.

    `reached`: what the work needs has answered in this run, so trouble may pass by itself. `failure` is one line once
    the lane has given up, `trouble` what is tried again at `retry_at` (monotonic seconds).
    """

    def __init__(
        self,
        report: StreamReport,
        folder: Path,
        stages: frozenset[Stage],
        *,
        on_trouble: Callable[[str | None], None],
        on_lost: Callable[[], None],
    ) -> None:
        """`stages` are those of the lane, `folder` is the site's.

        `on_trouble` notes an error, or None when it has passed; `on_lost` gives up the connections of the lane.
        """
        self._report, self._folder, self._stages = report, folder, stages
        self._on_trouble, self._on_lost = on_trouble, on_lost
        self.reached = False
        self.trouble: str | None = None
        self.failure: str | None = None
        self.retries = 0
        self.retry_at = 0.0

    @property
    def due(self) -> bool:
        """Whether a step may be tried now."""
        return self.failure is None and time.monotonic() >= self.retry_at

    def attempt(self, step: Callable[[], bool], *, final: Callable[[], bool]) -> bool:
        """Do one step; returns whether there was anything to do. Trouble is a failure once `final` says so."""
        label = self._report.stream.label
        try:
            busy = step()
        except TransientError as error:
            # An engine that was lost is started anew, whatever the servers have answered so far.
            self.reached |= isinstance(error, EngineLostError)
            self._weigh(_line(label, error), final=final())
            return False
        except OSError as error:
            self._fail(f"{label}: {cannot_write(error.filename or self._folder, error)}")
            return False
        except SrAssetsError as error:
            self._report.misconfigured |= isinstance(error, ConfigurationError)
            self._fail(_line(label, error))
            return False
        self.reached = True
        if self.retries:
            logger.info("%s: goes on after %d attempts", label, self.retries)
            self._on_trouble(None)
        self.retries, self.trouble = 0, None
        return busy

    def _weigh(self, trouble: str, *, final: bool) -> None:
        # A connection that a server has forgotten may look alive: none is trusted any more.
        self._on_lost()
        if final:
            self._fail(trouble)
            return
        self.trouble = trouble
        pause_seconds = min(_FIRST_PAUSE_SECONDS * 2.0**self.retries, _LONGEST_PAUSE_SECONDS)
        self.retries += 1
        self.retry_at = time.monotonic() + pause_seconds * random.uniform(0.5, 1.0)  # noqa: S311  jitter, not a secret
        logger.warning("%s; attempt %d in %.1f s", trouble, self.retries + 1, self.retry_at - time.monotonic())
        if self.retries == 1:
            self._on_trouble(trouble)

    def _fail(self, failure: str) -> None:
        self.failure, self.trouble = failure, None
        self._report.failures.append(failure)
        self._report.failed |= self._stages
        logger.error("%s", failure)


def _line(label: str, error: SrAssetsError) -> str:
    return str(error) if label in str(error) else f"{label}: {error}"


class Beside:
    """Runs one step after the other in a thread of its own; whoever polls is never kept waiting.

    The thread is a daemon: one that a frozen process keeps waiting must not keep ours from ending.
    """

    def __init__(self, name: str, woken: threading.Event) -> None:
        """Name the thread; `woken` is set whenever a step has ended."""
        self._name, self._woken = name, woken
        self._thread: threading.Thread | None = None
        self._busy = False
        self._error: BaseException | None = None

    @property
    def running(self) -> bool:
        """Whether a step is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, step: Callable[[], bool]) -> None:
        """Begin a step; the one before has ended and was taken note of."""

        def run() -> None:
            try:
                self._busy = step()
            except BaseException as error:  # noqa: BLE001  raised again where it is taken note of
                self._error = error
            finally:
                self._woken.set()

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def take(self) -> bool | None:
        """Return whether the step that has ended did anything; None when none has. Raises what it raised."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._busy

    def join(self, seconds: float) -> bool:
        """Wait for the step under way, at most so long; returns whether none is left."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.running
