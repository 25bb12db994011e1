"""The fence of a batch whose writers run on other machines: who may write into the target, as the target itself knows it.

A batch's fence is a consumer of the target stream, made by the run. A writer claims its part with another consumer, which
nobody else can make meanwhile, and looks again and again whether the fence still stands: each look is a lease for some
seconds, after which the kernel ends the process. Who takes the fence away knows when the last writer has ended. None of these
consumers delivers anything. Not here: when a fence is made and taken away (the stages), the writing (`copier`). The argument
is in docs/decisions/0021-clusters-that-share-nothing.md.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from sr_assets.adapters.connection_file import open_connection
from sr_assets.adapters.wire import Connection, WireError
from sr_assets.domain.errors import ExecutorLostError

if TYPE_CHECKING:
    from types import TracebackType

    from sr_assets.adapters.copying.plan import CopyPlan

#: How long a writer may write after it has asked whether its fence stands.
LEASE_SECONDS: Final = 10.0
#: How long after its fence was taken away a writer may still write: a process that stood still between two instructions may
#: extend its lease once more; and some seconds for what is on the wire.
LAST_WRITE_SECONDS: Final = 2 * LEASE_SECONDS + 3.0
_LOOK_SECONDS: Final = 2.0
_ANSWER_SECONDS: Final = 5.0
#: The server deletes a consumer that was unused for so long, as a killed run leaves them.
_FORGOTTEN_NS: Final = 24 * 3_600 * 1_000_000_000
_NO_CONSUMER: Final = 10014
_NO_STREAM: Final = 10059
_GONE: Final = frozenset({_NO_CONSUMER, _NO_STREAM})
_CLAIMED: Final = 10148


def make_fence(target: Connection, stream: str, fence: str, subjects: tuple[str, ...]) -> None:
    """Make a batch's fence; raises WireError when the target does not answer or does not allow it."""
    _create(target, stream, fence, subjects)


def take_away(target: Connection, stream: str, fence: str, writers: int) -> bool:
    """Take a batch's fence away; returns whether a writer may go on for up to `LAST_WRITE_SECONDS`.

    Harmless when it is gone. Raises WireError when the target does not answer: then nothing is known.
    """
    _ask(target, f"CONSUMER.DELETE.{stream}.{fence}")
    return any(_ask(target, f"CONSUMER.INFO.{stream}.{claim}") for claim in _claims(fence, writers))


def forget_claims(target: Connection, stream: str, fence: str, writers: int) -> None:
    """Delete the claims of writers that have ended without doing so."""
    for claim in _claims(fence, writers):
        _ask(target, f"CONSUMER.DELETE.{stream}.{claim}")


def may_ask(target: Connection, stream: str) -> None:
    """Ask for a fence that is not there; raises WireError when that is not allowed, or nobody answers."""
    _ask(target, f"CONSUMER.INFO.{stream}.sr_assets_check")


def _claims(fence: str, writers: int) -> list[str]:
    return [f"{fence}_{partition}" for partition in range(writers)]


def _ask(target: Connection, operation: str) -> bool:
    """Ask about, or delete, a consumer; returns whether it is there. Raises WireError with any other refusal."""
    return _is_there(target, operation, target.request(target.api(operation), {}))


def _is_there(target: Connection, operation: str, answer: dict[str, Any]) -> bool:
    error = answer.get("error")
    if error and error.get("err_code") not in _GONE:
        raise WireError(f"{target.address}: {operation}: {error.get('description')} ({error.get('err_code')})")
    return not error


def _create(target: Connection, stream: str, name: str, subjects: tuple[str, ...]) -> None:
    """Create a consumer that delivers nothing; raises ExecutorLostError when another writer made it, or WireError."""
    config: dict[str, Any] = {
        "name": name,
        "durable_name": name,
        # What makes two writers' claims differ: an equal consumer could be created twice.
        "description": secrets.token_hex(8),
        "deliver_policy": "new",
        "ack_policy": "explicit",
        "inactive_threshold": _FORGOTTEN_NS,
    }
    operation = f"CONSUMER.CREATE.{stream}.{name}"
    if subjects:
        # A subject of its own, so that it takes nothing from, and holds nothing for, a stream with another retention.
        config["filter_subject"] = ".".join(name if token in ("*", ">") else token for token in subjects[0].split("."))
        operation += f".{config['filter_subject']}"
    answer = target.request(target.api(operation), {"stream_name": stream, "config": config, "action": "create"})
    error = answer.get("error")
    if error and error.get("err_code") == _CLAIMED:
        raise ExecutorLostError(
            f"an earlier attempt to write into {stream} may still be at work; the batch is begun again"
        )
    if error:
        raise WireError(f"{target.address}: {operation}: {error.get('description')} ({error.get('err_code')})")


class Lease:
    """A writer's right to write, while it is entered: claimed once, and renewed by a thread as long as the fence stands.

    When it cannot be renewed the kernel ends the process, wherever it stands: no Python code has to run for that, so a
    process that stood still for long ends before its next instruction. Once the fence is gone the plan's file `batch` says
    so, at which the copier stops.
    """

    def __init__(self, plan: CopyPlan, partition: int, seconds: float = LEASE_SECONDS) -> None:
        """Take the plan, whose `fence` is set, and the writer's number; nothing is asked before it is entered."""
        self._plan, self._fence, self._seconds = plan, str(plan.fence), seconds
        self._claim = f"{plan.fence}_{partition}"
        self._ended = threading.Event()
        self._renewing = threading.Thread(target=self._renew_on, daemon=True)

    def __enter__(self) -> Self:
        """Claim the part and begin the lease; raises ExecutorLostError when the fence is gone or another writer has it."""
        with self._connection() as target:
            _create(target, self._plan.stream, self._claim, self._plan.subjects)
            if not self._renew(target):
                signal.setitimer(signal.ITIMER_REAL, 0)
                _ask(target, f"CONSUMER.DELETE.{self._plan.stream}.{self._claim}")
                raise ExecutorLostError(f"batch {self._plan.batch} was given up before this writer began")
        self._renewing.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the lease and give the part back; without an answer the claim stays, and the next attempt waits."""
        self._ended.set()
        self._renewing.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        with contextlib.suppress(WireError), self._connection() as target:
            _ask(target, f"CONSUMER.DELETE.{self._plan.stream}.{self._claim}")

    def _connection(self) -> Connection:
        return open_connection(self._plan.connection, "sr-assets writer: lease", request_seconds=_ANSWER_SECONDS)

    def _renew(self, target: Connection) -> bool:
        """Ask whether the fence stands, and extend the lease, which begins with the question."""
        asked_at = time.monotonic()
        if not _ask(target, f"CONSUMER.INFO.{self._plan.stream}.{self._fence}"):
            return False
        left_seconds = asked_at + self._seconds - time.monotonic()
        # By the kernel, as SIGALRM's own action: 0 would mean never.
        signal.setitimer(signal.ITIMER_REAL, max(left_seconds, 0.001))
        return True

    def _renew_on(self) -> None:
        """Renew until the end; a connection that is lost is opened again as long as the lease lasts."""
        while not self._ended.is_set():
            with contextlib.suppress(WireError), self._connection() as target:
                while not self._ended.wait(min(_LOOK_SECONDS, self._seconds / 5)):
                    if not self._renew(target):
                        Path(self._plan.folder, "batch").write_text("a later attempt")
                        return
            self._ended.wait(0.2)
