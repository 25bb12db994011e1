"""Administration of a cluster's JetStream: stream info, single messages, creating streams, publishing advisories.

Bulk traffic uses `wire`, because nats-py cannot carry headers byte for byte.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from sr_assets.adapters import times
from sr_assets.adapters.jetstream import (
    MESSAGE_NOT_FOUND,
    NO_RESPONDERS,
    STREAM_NOT_FOUND,
    TOO_FEW_SERVERS,
    WRONG_LAST_SEQUENCE,
    ApiError,
    PermissionDeniedError,
    check_response,
    consumer_creation,
    decode_response,
    encode_json,
    is_leaderless,
    parse_message,
    temporary_consumer,
)
from sr_assets.adapters.nats.client import ANY, REQUEST_SECONDS, ClientThread, PublishRules, error_text
from sr_assets.adapters.nats.stream_info import StreamInfo, Version, parse_stream_info
from sr_assets.adapters.wire import Ack, parse_ack
from sr_assets.adapters.wire.frames import Frame
from sr_assets.domain.advisories import published_again
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange, parse_rfc3339_ns
from sr_assets.domain.refusals import Reaction, reaction
from sr_assets.domain.target_stream import IMPOSSIBLE_SEQUENCE

_WINDOW: Final = 256
#: How long messages are sent after a check that we may still publish: a process can be suspended while it waits.
_GUARDED_SECONDS: Final = 0.1
#: More consecutive refusals than this are not about single messages.
_MOST_REFUSALS: Final = 512

#: Subject, payload, message id.
Item = tuple[str, bytes, str]
#: How long the server keeps a counting consumer that we failed to delete.
_COUNTER_LIFETIME_NS: Final = 30 * 1_000_000_000
#: How many stream infos are requested concurrently.
_CONCURRENT_REQUESTS: Final = 100
#: Of about 100 bytes each at most: a leaf node's link accepts messages of 1 MiB by default.
_LISTED: Final = 10_000


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
        self._guarded_until = -math.inf
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
            if times.boot_seconds() >= self._guarded_until:
                self._guarded_until = times.boot_seconds() + _GUARDED_SECONDS
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


class Cluster:
    """A connection to one cluster's JetStream, opened by `with` or the first call, closed at the end of `with`.

    On an error or a missing response every method raises RunError: one line with the cluster's label, without secrets.
    """

    def __init__(self, settings: ClusterSettings, name: str = "sr-assets", rules: PublishRules = ANY) -> None:
        self.settings = settings
        self.last_refusal: str | None = None
        self._guard = rules.guard
        self._thread = ClientThread(settings, name, rules)

    def __enter__(self) -> Self:
        try:
            self._thread.connected()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end its thread; do nothing if it is not open."""
        self._thread.close()

    @property
    def is_lost(self) -> bool:
        """Whether the connection was lost since the last call: the server may return with an earlier state."""
        return self._thread.is_lost

    @property
    def server_version(self) -> Version:
        """The version of the connected server; other servers of its cluster may differ."""
        return _version(self._thread.connected())

    @property
    def max_payload(self) -> int:
        """The largest message that the server accepts, headers included, in bytes."""
        return self._thread.connected().max_payload

    def request_api(self, operation: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the response to an API operation such as `STREAM.NAMES`; raises ApiError with the server's message."""
        return self._thread.run(self._request(operation, body))

    def stream_info(self, stream: str) -> StreamInfo:
        """Return a stream's info from its leader; raises ApiError if the stream does not exist."""
        return self._thread.run(self._stream_info(stream))

    def stream_infos(self, streams: Sequence[str]) -> dict[str, StreamInfo | RunError]:
        """Return the info of each stream, or the error that `stream_info` raises; the requests are concurrent."""
        return self._thread.run(
            self._stream_infos(streams), REQUEST_SECONDS * (1 + len(streams) // _CONCURRENT_REQUESTS)
        )

    def list_streams(self) -> list[dict[str, Any]]:
        """Return the infos of all streams that their leaders send; pages after the first are requested concurrently."""
        first = self.request_api("STREAM.LIST", {"offset": 0})
        # A page is shorter than the limit if a leader did not respond in time.
        offsets = range(first["limit"], first["total"], first["limit"]) if first.get("limit") else ()
        pages = [first, *self._thread.run(self._stream_pages(offsets), REQUEST_SECONDS)]
        # The server adds an empty state for each stream whose servers are all offline.
        missing = {name for page in pages for name in page.get("missing") or ()}
        infos = [info for page in pages for info in page.get("streams") or ()]
        return [info for info in infos if info["config"]["name"] not in missing and not is_leaderless(info)]

    def find_stream(self, stream: str) -> StreamInfo | None:
        """Return a stream's info from its leader, or None if the stream does not exist."""
        try:
            return self.stream_info(stream)
        except ApiError as error:
            if error.code == STREAM_NOT_FOUND:
                return None
            raise

    def stream_exists(self, stream: str) -> bool:
        """Return whether the stream exists."""
        return self.find_stream(stream) is not None

    def stream_names(self, subject: str = ">") -> list[str]:
        """Return the streams whose subjects overlap the given one."""
        names: list[str] = []
        while True:
            answer = self.request_api("STREAM.NAMES", {"subject": subject, "offset": len(names)})
            page = answer.get("streams") or []
            names += page
            if not page or len(names) >= answer["total"]:
                return names

    def create_stream(self, config: dict[str, Any]) -> StreamInfo:
        """Create a stream, with fewer replicas if the cluster has too few servers; return the info of the new stream."""
        for replicas in range(config.get("num_replicas", 1), 0, -1):
            try:
                answer = self.request_api(f"STREAM.CREATE.{config['name']}", {**config, "num_replicas": replicas})
            except ApiError as error:
                if error.code not in TOO_FEW_SERVERS or replicas == 1:
                    raise
            else:
                return parse_stream_info(answer, self.server_version)
        raise RunError(f"stream {config['name']}: num_replicas {config['num_replicas']!r} is not at least 1")

    def message(self, stream: str, sequence: int) -> Message | None:
        """Return a message from the stream's leader, or None if the stream does not hold it."""
        return self._message(stream, {"seq": sequence})

    def direct_time(self, stream: str, sequence: int) -> int | None:
        """Return the stored time (ns) of a message from any replica by direct get, or None without one.

        The response is no larger than the message in a copy; that of the leader has it as base64.
        """
        return self._thread.run(self._direct_time(stream, sequence))

    def next_message(self, stream: str, sequence: int, subject: str = ">") -> Message | None:
        """Return the leader's first matching message at or after a sequence, or None."""
        return self._message(stream, {"seq": sequence, "next_by_subj": subject})

    def last_message(self, stream: str, subject: str = ">") -> Message | None:
        """Return the leader's last matching message, or None."""
        return self._message(stream, {"last_by_subj": subject})

    def count_from(self, stream: str, sequence: int, subject: str | None = None) -> int:
        """Count the messages at or after a sequence, by creating and deleting a consumer."""
        name = f"sr_count_{secrets.token_hex(8)}"
        config = temporary_consumer(name, sequence, subject, _COUNTER_LIFETIME_NS)
        answer = self.request_api(*consumer_creation(stream, config))
        self.request_api(f"CONSUMER.DELETE.{stream}.{name}")
        return int(answer["num_pending"])

    def deleted_in(self, stream: str, covered: SequenceRange) -> list[int]:
        """Return the sequences of a range, ascending, that the leader lists as deleted between existing messages."""
        answer = self.request_api(f"STREAM.INFO.{stream}", {"deleted_details": True})
        return sorted(number for number in answer["state"].get("deleted") or () if number in covered)

    def publish_many(
        self,
        items: Sequence[Item],
        senders: Sequence[str] | None = None,
        timeout_seconds: float = REQUEST_SECONDS,
    ) -> list[Delivery]:
        """Publish (subject, payload, message id) in order into JetStream; return one `Delivery` for each.

        With `senders`, one for each item, a sender's next message waits for the previous acknowledgement, and a refused
        message holds back later ones of its sender, to keep their order. A message stays unacknowledged if the timeout
        passes after the previous acknowledgement, or the connection is lost: resend it with the same id. `last_refusal`
        then has the reason. Sending stops after many consecutive refusals.

        Another publisher of the stream may already have used the id, on another subject. Then the message is sent again
        with a random id.
        """
        items, keys = list(items), list(senders or range(len(items)))
        deliveries, left = [Delivery(acknowledged=False)] * len(items), list(range(len(items)))
        configs = dict[tuple[str | None, str], dict[str, Any] | None]()
        while True:
            work = self._publish_many(
                [items[number] for number in left], [keys[number] for number in left], timeout_seconds
            )
            publisher = self._thread.run(work, timeout_seconds * max(1, len(left)))
            self.last_refusal = publisher.problem
            for number, delivery in zip(left, publisher.deliveries, strict=True):
                deliveries[number] = delivery
            duplicates = {left[at]: stored for at, stored in publisher.duplicates.items()}
            for number, stored in duplicates.items():
                subject, payload, message_id = items[number]
                try:
                    if not self._is_stored(subject, *stored, configs):
                        items[number] = subject, payload, published_again(message_id, secrets.token_hex(8))
                        deliveries[number] = Delivery(acknowledged=False)
                except RunError as error:
                    publisher.problem = self.last_refusal = str(error)
                    deliveries[number] = Delivery(acknowledged=False)
            waiting = {keys[number] for number in duplicates}
            left = [
                number
                for number in left
                if keys[number] in waiting and not deliveries[number].acknowledged and not deliveries[number].refusal
            ]
            if not left or publisher.problem:
                return deliveries

    def _is_stored(
        self,
        subject: str,
        domain: str | None,
        stream: str,
        sequence: int,
        configs: dict[tuple[str | None, str], dict[str, Any] | None],
    ) -> bool:
        """Return whether a stream may hold a message of ours at the sequence that it names for a duplicate.

        `configs` keeps the configuration of each stream, or None for one that we cannot read, as in another domain.
        """
        key = domain, stream
        try:
            if key not in configs:
                ours = self.settings.domain in (None, domain) and stream in self.stream_names(subject)
                configs[key] = self.stream_info(stream).config if ours else None
            if (config := configs[key]) is None:
                return True
            stored = self.message(stream, sequence)
        except PermissionDeniedError:
            configs[key] = None
            return True
        if stored is None:
            return config.get("retention") != "limits"
        return stored.subject == subject or bool(config.get("subject_transform"))

    def publish(self, subject: str, payload: bytes, headers: dict[str, str]) -> None:
        """Publish one message into JetStream; raises RunError unless a stream stores it."""
        self._thread.run(self._publish(subject, payload, headers))

    def publish_core(self, items: Iterable[tuple[str, bytes]]) -> None:
        """Publish (subject, payload) without JetStream, and wait until the server has received them.

        Raises PermissionDeniedError if the user may not publish one of them.
        """
        self._guard()
        self._thread.run(self._thread.send(items))

    def try_publishing(self, subject: str) -> None:
        """Raise RunError unless a stream accepts a subject and we may publish there; nothing is stored.

        The message carries an expectation that cannot hold: the server's refusal of it proves both.
        """
        code, refusal = self._thread.run(self._publish_refusal(subject))
        if code != WRONG_LAST_SEQUENCE:
            raise RunError(f"{self.settings.label}: {subject}: {refusal}")

    def _message(self, stream: str, body: dict[str, Any]) -> Message | None:
        try:
            return parse_message(self.request_api(f"STREAM.MSG.GET.{stream}", body))
        except ApiError as error:
            if error.code == MESSAGE_NOT_FOUND:
                return None
            raise

    # ----------------------------------------------------------------------------- in the connection's own thread

    async def _request(self, operation: str, body: dict[str, Any] | None) -> dict[str, Any]:
        answer = await self._thread.ask(self.settings.api(operation), encode_json(body) if body else b"")
        try:
            response = decode_response(answer.data)
        except ValueError as error:
            raise RunError(f"{self.settings.label}: {operation}: {error}") from None
        return check_response(self.settings.label, operation, response)

    async def _stream_info(self, stream: str) -> StreamInfo:
        try:
            answer = await self._request(f"STREAM.INFO.{stream}", None)
        except ApiError as error:
            if error.code == STREAM_NOT_FOUND:
                text = f"stream {stream} does not exist on {self.settings.label}; create it, or correct its name"
                raise ApiError(text, error.code) from None
            raise
        return parse_stream_info(answer, _version(self._thread.opened()))

    async def _direct_time(self, stream: str, sequence: int) -> int | None:
        try:
            answer = await self._thread.ask(self.settings.api(f"DIRECT.GET.{stream}"), encode_json({"seq": sequence}))
        except ApiError:
            return None
        headers = answer.headers or {}
        # A mirror answers, too.
        return parse_rfc3339_ns(headers["Nats-Time-Stamp"]) if headers.get("Nats-Stream") == stream else None

    async def _stream_infos(self, streams: Sequence[str]) -> dict[str, StreamInfo | RunError]:
        slots = asyncio.Semaphore(_CONCURRENT_REQUESTS)

        async def info(stream: str) -> StreamInfo | RunError:
            async with slots:
                try:
                    return await self._stream_info(stream)
                except RunError as error:
                    return error

        return dict(zip(streams, await asyncio.gather(*map(info, streams)), strict=True))

    async def _stream_pages(self, offsets: Iterable[int]) -> list[dict[str, Any]]:
        return await asyncio.gather(*(self._request("STREAM.LIST", {"offset": offset}) for offset in offsets))

    async def _publish_many(
        self, items: Sequence[Item], senders: Sequence[object], timeout_seconds: float
    ) -> ItemPublisher:
        publisher = ItemPublisher(self._thread, senders, timeout_seconds, self._guard)
        await publisher.publish(items)
        return publisher

    async def _publish(self, subject: str, payload: bytes, headers: dict[str, str]) -> None:
        try:
            refusal = refusal_text(read_ack(await self._thread.ask(subject, payload, headers)))
        except ApiError:
            refusal = "no stream takes this subject"
        if refusal:
            raise RunError(f"{self.settings.label}: {subject}: {refusal}")

    async def _publish_refusal(self, subject: str) -> tuple[int, str]:
        headers = {"Nats-Expected-Last-Sequence": str(IMPOSSIBLE_SEQUENCE)}
        try:
            ack = read_ack(await self._thread.ask(subject, b"", headers))
        except ApiError as error:
            return error.code, "no stream takes this subject"
        return ack.error_code or 0, refusal_text(ack) or "stored"


def _version(client: Client) -> Version:
    version = client.connected_server_version
    return version.major, version.minor, version.patch


class TooManySubjectsError(RunError):
    """A list of a stream's subjects may be larger than the messages that a leaf node's link accepts."""


def held_subjects(cluster: Cluster, stream: str, subject: str = ">") -> Iterator[str]:
    """Yield the subjects of a stream's messages that match a pattern, from pages of 100,000.

    Raises TooManySubjectsError for a stream of another domain or account with more than 10,000 subjects: a leaf node closes
    its link on a response over `max_payload`.
    """
    if cluster.settings.api_owner:
        count = cluster.request_api(f"STREAM.INFO.{stream}")["state"].get("num_subjects", 0)
        if count > _LISTED:
            raise TooManySubjectsError(f"{stream} holds {count} subjects, too many to list through a leaf node")
    offset, total = 0, 1
    while offset < total:
        answer = cluster.request_api(f"STREAM.INFO.{stream}", {"subjects_filter": subject, "offset": offset})
        page = answer["state"].get("subjects") or {}
        yield from page
        offset, total = offset + len(page), answer.get("total", 0) if page else 0
