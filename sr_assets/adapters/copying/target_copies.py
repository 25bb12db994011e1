"""The copies that a target holds, read by the writer that adds to them."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from sr_assets.adapters import wire
from sr_assets.adapters.copying.plan import CopyPlan
from sr_assets.adapters.jetstream import STREAM_NOT_FOUND, ApiError
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.provenance import CopyOf, find_copy, is_copy_of

_LIMITS: Final = ("max_age", "max_bytes", "max_msgs", "max_msgs_per_subject")


class FoundCopy(NamedTuple):
    """A message of the target with the headers of a copy: its sequence there, its original, its sizes without and with
    headers.
    """

    at: int
    of: CopyOf
    payload_bytes: int
    stored_bytes: int


class TargetCopies:
    """Our copies in a plan's target; `last` is the target's last sequence that is accounted for."""

    def __init__(self, plan: CopyPlan, target: wire.Connection) -> None:
        self._plan, self._target = plan, target
        self.last = plan.since
        #: Whether the plan's messages may be published in fast-ingest batches.
        self.takes_batches = False
        #: Whether the target deletes copies by itself, as a limit or its consumers demand.
        self.deletes = False
        #: Larger messages are not read by the API: its response is a third larger, base64 in JSON, and a leaf node closes
        #: its link on a response over `max_payload`.
        self.large_bytes = target.max_payload_bytes * 7 // 10

    def found(self) -> Iterator[FoundCopy]:
        """Yield the adopted copies and those stored since the intent."""
        plan, count = self._plan, 0
        last, takes_batches = self._read_stream()
        self.last = max(plan.since, last)
        stored_since = SequenceRange(plan.since + 1, self.last + 1)
        for held in (SequenceRange(*plan.adopted), stored_since):
            for copy in self._copies(held):
                # Between adopted copies are copies of other batches and of earlier restarts.
                if held is stored_since or (
                    plan.first <= copy.of.sequence < plan.next and not copy.of.is_before(plan.resend)
                ):
                    count += 1
                    yield copy
        # A batch does not name its duplicates, so messages that an earlier attempt may have sent are published one by one.
        self.takes_batches = plan.batched and takes_batches and not count and plan.adopted == (0, 0)

    def added(self) -> Iterator[FoundCopy]:
        """Yield the copies stored after `last`, and move `last` to the end."""
        before = self.last
        self.last, _ = self._read_stream()
        return self._copies(SequenceRange(before + 1, self.last + 1))

    def at(self, target_sequence: int) -> tuple[Message | None, CopyOf | None]:
        """Return a message of the target, perhaps without its payload, and the copy that it is."""
        # One request, unless it may pass a leaf node's link, which a large response closes.
        read = wire.stored_headers if self._target.cluster.api_owner else wire.stored_message
        stored = read(self._target, self._plan.stream, target_sequence)
        return stored, self._copy(stored) if stored else None

    def genuine(self, claims: Iterable[FoundCopy], originals: Mapping[int, Message]) -> set[int]:
        """Return the target sequences of those claimed copies that have the content of their originals, by source sequence.

        Only a message with the size of its original is read: whoever forges one may have made it too large for a link.
        """
        possible = {copy.at: copy for copy in claims if copy.payload_bytes == originals[copy.of.sequence].payload_bytes}
        small = sorted(at for at, copy in possible.items() if copy.stored_bytes <= self.large_bytes)
        lists = wire.read_sequences(self._target, self._plan.stream, small, direct=False)
        read = itertools.chain(itertools.chain.from_iterable(lists), self._large(possible.values()))
        return {
            message.sequence
            for message in read
            if is_copy_of(message, originals[possible[message.sequence].of.sequence])
        }

    def is_genuine(self, stored: Message, original: Message) -> bool:
        """Return whether a message of `at` has the content of its original."""
        if not stored.unread_bytes or not is_copy_of(stored, original):
            return is_copy_of(stored, original)
        return bool(self.genuine(filter(None, [self._found(stored)]), {original.sequence: original}))

    def _large(self, copies: Iterable[FoundCopy]) -> Iterator[Message]:
        for copy in copies:
            # What exceeds `max_payload` has not been published by this connection, and cannot be delivered to it.
            if self.large_bytes < copy.stored_bytes <= self._target.max_payload_bytes:
                message = wire.stored_large(self._target, self._plan.stream, copy.at)
                if message is not None:
                    yield message

    def _copies(self, held: SequenceRange) -> Iterator[FoundCopy]:
        for message in itertools.chain.from_iterable(wire.read_headers(self._target, self._plan.stream, held)):
            if copy := self._found(message):
                yield copy

    def _found(self, message: Message) -> FoundCopy | None:
        copy, size = self._copy(message), message.payload_bytes
        return copy and FoundCopy(message.sequence, copy, size, len(message.headers) + size)

    def _copy(self, message: Message) -> CopyOf | None:
        return find_copy(message.headers, self._plan.identity, self._plan.created_ns)

    def _read_stream(self) -> tuple[int, bool]:
        """Return the target's last sequence, and whether it accepts fast-ingest batches on this connection."""
        try:
            info = self._target.request_api(f"STREAM.INFO.{self._plan.stream}")
        except ApiError as error:
            if error.code == STREAM_NOT_FOUND:
                raise RunError(f"target stream {self._plan.stream} does not exist on {self._target.address}") from None
            raise
        config = info["config"]
        self.deletes = config.get("retention", "limits") != "limits" or any(
            config.get(limit, 0) > 0 for limit in _LIMITS
        )
        # A service import replaces the reply subject that describes the batch.
        takes = bool(config.get("allow_batched")) and not self._target.cluster.api_owner
        return int(info["state"]["last_seq"]), takes
