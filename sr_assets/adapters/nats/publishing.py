"""Publishing of a list of messages through nats-py, with a bounded window and in order per sender."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from sr_assets.adapters.jetstream import NO_RESPONDERS
from sr_assets.adapters.nats.client import ClientThread
from sr_assets.adapters.nats.secured_client import error_text
from sr_assets.adapters.wire import Ack, parse_ack
from sr_assets.adapters.wire.frames import Frame
from sr_assets.domain.refusals import Reaction, reaction

_WINDOW: Final = 256
#: So many messages are sent without checking whether we may still publish.
_GUARDED: Final = 64
#: More consecutive refusals than this are not about single messages.
_MOST_REFUSALS: Final = 512

#: Subject, payload, message id.
Item = tuple[str, bytes, str]


@dataclass(frozen=True, slots=True)
class Delivery:
    """The outcome of a published message: stored, refused with a reason, or unknown.

    `by_stream`: the stream, its account or its server refuses other messages too.
    """

    acknowledged: bool
    refusal: str | None = None
    by_stream: bool = False


_UNKNOWN: Final = Delivery(acknowledged=False)


class ItemPublisher:
    """Publishes items in order and records the outcome of each; used once, in the connection's own thread.

    A sender's next item waits for the previous acknowledgement, and a refused item holds back later ones of its sender,
    to keep their order; so does one of `duplicates`, the items that a stream says it stores: its domain, its name, the
    sequence there.
    `problem` is the reason why an outcome is unknown; the timeout starts with each acknowledgement.
    """

    def __init__(
        self, thread: ClientThread, senders: Sequence[object], timeout_seconds: float, guard: Callable[[], None]
    ) -> None:
        self.deliveries = [_UNKNOWN] * len(senders)
        self.problem: str | None = None
        self.duplicates: dict[int, tuple[str | None, str, int]] = {}
        self._thread = thread
        self._senders = senders
        self._timeout_seconds, self._guard = timeout_seconds, guard
        self._under_way: set[object] = set()
        self._held_back: set[object] = set()
        self._refused_in_a_row = 0
        self._postpone()

    async def publish(self, items: Sequence[Item]) -> None:
        """Publish all items and wait for their acknowledgements; `problem` says why one is missing."""
        client = self._thread.opened()
        self._thread.complaint = None
        inbox = client.new_inbox()
        subscription = await client.subscribe(f"{inbox}.*", cb=self._on_answer)
        try:
            await self._send(client, inbox, items)
            while self._under_way and not self._thread.complaint:
                await self._next_answer()
        except TimeoutError:
            self.problem = f"no acknowledgement within {self._timeout_seconds:g} s"
        except (OSError, nats.errors.Error) as error:
            # Acknowledgements received before the error are valid.
            self._thread.complaint = self._thread.complaint or error_text(error)
        finally:
            if not client.is_closed:
                await subscription.unsubscribe()
        self.problem = self.problem or self._thread.complaint

    async def _send(self, client: Client, inbox: str, items: Sequence[Item]) -> None:
        for number, ((subject, payload, message_id), sender) in enumerate(zip(items, self._senders, strict=True)):
            while (sender in self._under_way or len(self._under_way) >= _WINDOW) and not self._thread.complaint:
                await self._next_answer()
            if self._refused_in_a_row >= _MOST_REFUSALS or self._thread.complaint:
                return
            if sender in self._held_back:
                continue
            if number % _GUARDED == 0:
                self._guard()
            self._under_way.add(sender)
            await client.publish(subject, payload, reply=f"{inbox}.{number}", headers={"Nats-Msg-Id": message_id})

    async def _on_answer(self, message: Msg) -> None:
        number = int(message.subject.rpartition(".")[2])
        ack = read_ack(message)
        refusal = refusal_text(ack)
        # Another stream may take other subjects.
        waits = ack.error_code != NO_RESPONDERS and reaction(ack.error_code, ack.error) is not Reaction.PARK
        self.deliveries[number] = Delivery(refusal is None, refusal, refusal is not None and waits)
        self._refused_in_a_row = self._refused_in_a_row + 1 if refusal else 0
        if ack.duplicate:
            answer = json.loads(message.data)
            self.duplicates[number] = answer.get("domain"), str(answer.get("stream")), ack.target_sequence or 0
        if refusal or ack.duplicate:
            self._held_back.add(self._senders[number])
        self._under_way.discard(self._senders[number])
        self._postpone()
        self._thread.woken.set()

    async def _next_answer(self) -> None:
        self._thread.woken.clear()
        await asyncio.wait_for(self._thread.woken.wait(), self._deadline - asyncio.get_running_loop().time())

    def _postpone(self) -> None:
        self._deadline = asyncio.get_running_loop().time() + self._timeout_seconds


def read_ack(message: Msg) -> Ack:
    """Parse an acknowledgement that nats-py received, with the parser of `wire`."""
    status = (message.headers or {}).get("Status")
    headers = f"NATS/1.0 {status}\r\n\r\n".encode() if status else b""
    return parse_ack(0, Frame(b"HMSG", headers=headers, payload=message.data))


def refusal_text(ack: Ack) -> str | None:
    """Return why the server did not store a message, with its error code, or None if it did."""
    if ack.error is None or ack.error_code in (None, NO_RESPONDERS):
        return ack.error
    return f"{ack.error} ({ack.error_code})"
