"""The copies that a target holds, read by the writer that adds to them."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Final

from sr_assets.adapters import wire
from sr_assets.adapters.copying.plan import CopyPlan
from sr_assets.adapters.jetstream import STREAM_NOT_FOUND, ApiError
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.provenance import CopyOf, find_copy

_LIMITS: Final = ("max_age", "max_bytes", "max_msgs", "max_msgs_per_subject")


class TargetCopies:
    """Our copies in a plan's target; `last` is the target's last sequence that is accounted for."""

    def __init__(self, plan: CopyPlan, target: wire.Connection) -> None:
        self._plan, self._target = plan, target
        self.last = plan.since
        #: Whether the plan's messages may be published in fast-ingest batches.
        self.takes_batches = False
        #: Whether the target deletes copies by itself, as a limit or its consumers demand.
        self.deletes = False

    def found(self) -> Iterator[tuple[int, CopyOf]]:
        """Yield the adopted copies and those stored since the intent, each with its target sequence."""
        plan, count = self._plan, 0
        last, takes_batches = self._read_stream()
        self.last = max(plan.since, last)
        stored_since = SequenceRange(plan.since + 1, self.last + 1)
        for held in (SequenceRange(*plan.adopted), stored_since):
            for target_sequence, copy in self._copies(held):
                # Between adopted copies are copies of other batches and of earlier restarts.
                if held is stored_since or (
                    plan.first <= copy.sequence < plan.next and not copy.is_before(plan.resend)
                ):
                    count += 1
                    yield target_sequence, copy
        # A batch does not name its duplicates, so messages that an earlier attempt may have sent are published one by one.
        self.takes_batches = plan.batched and takes_batches and not count and plan.adopted == (0, 0)

    def added(self) -> Iterator[tuple[int, CopyOf]]:
        """Yield the copies stored after `last`, each with its target sequence, and move `last` to the end."""
        before = self.last
        self.last, _ = self._read_stream()
        return self._copies(SequenceRange(before + 1, self.last + 1))

    def at(self, target_sequence: int) -> tuple[Message | None, CopyOf | None]:
        """Return a message of the target, perhaps without its payload, and the copy that it is."""
        # One request, unless it may pass a leaf node's link, which a large response closes.
        read = wire.stored_headers if self._target.cluster.api_owner else wire.stored_message
        stored = read(self._target, self._plan.stream, target_sequence)
        return stored, self._copy(stored) if stored else None

    def contents(self, target_sequences: Iterable[int]) -> dict[int, Message]:
        """Return messages of the target by their sequences."""
        lists = wire.read_sequences(self._target, self._plan.stream, sorted(target_sequences), direct=False)
        return {message.sequence: message for messages in lists for message in messages}

    def _copies(self, held: SequenceRange) -> Iterator[tuple[int, CopyOf]]:
        for message in itertools.chain.from_iterable(wire.read_headers(self._target, self._plan.stream, held)):
            if copy := self._copy(message):
                yield message.sequence, copy

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
