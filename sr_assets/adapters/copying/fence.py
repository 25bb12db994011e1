"""Fences: consumers on the target stream that permit a batch's writers on other machines to write.

The run creates the fence. Each writer claims its part with a second consumer, which no other writer can create, and checks
every few seconds that the fence exists. Each check renews a lease; when it expires, the kernel ends the process. Deleting
the fence therefore bounds the time until the last write. None of these consumers delivers messages. For the reasoning, see
docs/decisions/0021-clusters-that-share-nothing.md.
"""

import contextlib
import secrets
import signal
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from sr_assets.adapters import times
from sr_assets.adapters.connection_file import open_connection
from sr_assets.adapters.copying.copy_plan import CopyPlan
from sr_assets.adapters.jetstream import (
    CONSUMER_EXISTS,
    CONSUMER_NOT_FOUND,
    STREAM_NOT_FOUND,
    ApiError,
    JetStreamApi,
    consumer_creation,
)
from sr_assets.adapters.wire import WireError
from sr_assets.domain.errors import ExecutorLostError

#: How long a writer may write after it has checked its fence.
LEASE_SECONDS: Final = 10.0
#: How long a writer may still write after its fence was deleted: a process that was frozen between two instructions may renew
#: its lease once more, and bytes in transit take some seconds.
LAST_WRITE_SECONDS: Final = 2 * LEASE_SECONDS + 3.0
_CHECK_SECONDS: Final = 2.0
_AGAIN_SECONDS: Final = 0.2
_ANSWER_SECONDS: Final = 5.0
#: Attempts to release a claim: the second one opens a new connection.
_RELEASES: Final = 2
#: After this time the server deletes a consumer that a killed run left behind.
_INACTIVE_NS: Final = 24 * 3_600 * 1_000_000_000


def make_fence(target: JetStreamApi, stream: str, fence: str, subjects: tuple[str, ...]) -> None:
    """Create a batch's fence, a consumer that delivers no messages; also a writer's claim of its part.

    Raises ExecutorLostError if another writer has created it, ApiError on another refusal.
    """
    config: dict[str, Any] = {
        "name": fence,
        "durable_name": fence,
        # Makes each claim unique: the server accepts a second creation of an equal consumer.
        "description": secrets.token_hex(8),
        "deliver_policy": "new",
        "ack_policy": "explicit",
        "inactive_threshold": _INACTIVE_NS,
    }
    if subjects:
        # A subject without messages, so that the consumer affects no stream with interest or work-queue retention.
        config["filter_subject"] = ".".join(fence if token in ("*", ">") else token for token in subjects[0].split("."))
    try:
        target.request_api(*consumer_creation(stream, config, action="create"))
    except ApiError as error:
        if error.code != CONSUMER_EXISTS:
            raise
        raise ExecutorLostError(
            f"an earlier attempt to write into {stream} may still be running; the batch is restarted"
        ) from None


def take_away(target: JetStreamApi, stream: str, fence: str, writers: int) -> bool:
    """Delete a batch's fence, if it exists; return whether a writer may continue for up to `LAST_WRITE_SECONDS`.

    Raises TransientError if the target does not respond: then the fence may still exist.
    """
    _request_consumer(target, f"CONSUMER.DELETE.{stream}.{fence}")
    return any(_request_consumer(target, f"CONSUMER.INFO.{stream}.{claim}") for claim in _claims(fence, writers))


def forget_claims(target: JetStreamApi, stream: str, fence: str, writers: int) -> None:
    """Delete the claims that ended writers left behind."""
    for claim in _claims(fence, writers):
        _request_consumer(target, f"CONSUMER.DELETE.{stream}.{claim}")


def probe_fence(target: JetStreamApi, stream: str) -> None:
    """Request the info of a nonexistent fence; raises RunError if the server refuses or does not respond."""
    _request_consumer(target, f"CONSUMER.INFO.{stream}.sr_assets_check")


def _claims(fence: str, writers: int) -> list[str]:
    return [f"{fence}_{partition}" for partition in range(writers)]


def _request_consumer(target: JetStreamApi, operation: str) -> bool:
    """Request a consumer's info or deletion; return whether it existed."""
    try:
        target.request_api(operation)
    except ApiError as error:
        if error.code not in (CONSUMER_NOT_FOUND, STREAM_NOT_FOUND):
            raise
        return False
    return True


class WritePermit:
    """A writer's permission to write, as a context manager: claimed once and renewed by a thread while the fence exists.

    If the lease expires, the kernel ends the process without running Python code, so a process that was frozen ends
    before its next instruction. After the fence was deleted, the plan's file `batch` names another attempt, and the copier
    stops.
    """

    def __init__(self, plan: CopyPlan, partition: int, seconds: float = LEASE_SECONDS) -> None:
        self._plan, self._fence, self._seconds = plan, str(plan.fence), seconds
        self._claim = f"{plan.fence}_{partition}"
        # One for all requests: a new connection costs several round trips to the target.
        self._target = open_connection(plan.connection, "sr-assets writer: lease", request_seconds=_ANSWER_SECONDS)
        self._is_lost = False
        self._ended = threading.Event()
        self._renewing = threading.Thread(target=self._renew_on, daemon=True)

    def __enter__(self) -> Self:
        """Claim the part and start the lease; raises ExecutorLostError if the fence was deleted or the part is claimed."""
        self._target.open()
        try:
            make_fence(self._target, self._plan.stream, self._claim, self._plan.subjects)
            if not self._renew():
                signal.setitimer(signal.ITIMER_REAL, 0)
                self._request("DELETE", self._claim)
                raise ExecutorLostError(f"batch {self._plan.batch} was abandoned before this writer started")
        except BaseException:
            self._target.close()
            raise
        self._renewing.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the lease and release the claim; if the target does not respond, the claim stays and the next attempt waits."""
        self._ended.set()
        self._renewing.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        for _ in range(_RELEASES):
            with contextlib.suppress(WireError):
                self._request("DELETE", self._claim)
                break
        self._target.close()

    def _request(self, operation: str, consumer: str) -> bool:
        """Request a consumer's info or deletion, on a new connection if the last one was lost; return whether it existed."""
        if self._is_lost:
            self._target.close()
            self._target.open()
        self._is_lost = True
        existed = _request_consumer(self._target, f"CONSUMER.{operation}.{self._plan.stream}.{consumer}")
        self._is_lost = False
        return existed

    def _renew(self) -> bool:
        """Extend the lease, counted from this request, if the fence exists; return whether it does."""
        requested_at = times.monotonic()
        if not self._request("INFO", self._fence):
            return False
        left_seconds = requested_at + self._seconds - times.monotonic()
        # The kernel's default action of SIGALRM ends the process; 0 would disable the timer.
        signal.setitimer(signal.ITIMER_REAL, max(left_seconds, 0.001))
        return True

    def _renew_on(self) -> None:
        """Renew the lease until it ends, sooner after a lost connection."""
        while not self._ended.wait(_AGAIN_SECONDS if self._is_lost else min(_CHECK_SECONDS, self._seconds / 5)):
            with contextlib.suppress(WireError):
                if not self._renew():
                    Path(self._plan.folder, "batch").write_text("a later attempt")
                    return
