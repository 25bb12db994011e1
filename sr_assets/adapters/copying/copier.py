"""One writer's work on a batch: it finds earlier copies in the target, fetches, sends, stages and accounts.

A refused or unacknowledged message is sent again. Only a message that the target can never store is parked, as
`domain/refusals.py` decides. Any other refusal that lasts ends the stream's run with its intent open.

A message that the source has lost since it was copied is staged from the target.
"""

import bisect
import contextlib
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from sr_assets.adapters import times, wire
from sr_assets.adapters.connection_file import open_connection
from sr_assets.adapters.copying.copy_plan import CopyPlan
from sr_assets.adapters.copying.receipt import MOST_HEARTBEATS, Parked, Receipt
from sr_assets.adapters.crash_points import Point, reach
from sr_assets.adapters.garbage import gc_paused
from sr_assets.adapters.jetstream import STREAM_NOT_FOUND, ApiError
from sr_assets.adapters.locking import lock
from sr_assets.adapters.published.history import StagedFiles
from sr_assets.domain.backoff import backoff_seconds
from sr_assets.domain.errors import RunError, SrAssetsError, TransientError, cannot_write
from sr_assets.domain.hops import hops, is_heartbeat
from sr_assets.domain.messages import Message, header_writer
from sr_assets.domain.positions import SequenceRange, merge_ranges, parse_rfc3339_ns
from sr_assets.domain.provenance import CopyOf, find_copy, is_copy_of, other_writer_text
from sr_assets.domain.refusals import Reaction, reaction
from sr_assets.domain.subjects import lane_check, matcher, printable, source_subject, target_subject
from sr_assets.domain.tracking.rules import ALL, untracked

_LIMITS: Final = ("max_age", "max_bytes", "max_msgs", "max_msgs_per_subject")
T = TypeVar("T")
#: The messages of a writer: source sequence → node, None for an untracked sender; or the source sequences of a plain stream.
Rows = Mapping[int, str | None] | range
_REFUSAL_SECONDS: Final = 30.0
_ACK_SECONDS: Final = 30.0
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 5.0
#: After so many parked messages of a batch, subjects and reasons are shortened: a publisher chooses them.
_WHOLE_TEXTS: Final = 1000
_MOST_LETTERS: Final = 200
_SUBJECTS: Final = 1 << 16
_TARGET: Final = "sr-assets writer: target"
_STAGED_AT_ONCE: Final = 500
_STAGED_BYTES: Final = 8 << 20
_LOCK_SECONDS: Final = 60.0
_LANES_AT_ONCE: Final = 16


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
        """Yield the adopted copies and those stored since the intent.

        Raises TransientError if the target has lost messages since the intent.
        """
        plan, count = self._plan, 0
        self.last, takes_batches = self._read_stream()
        if self.last < plan.since:
            raise TransientError(
                f"target stream {plan.stream} ends at {self.last}, before {plan.since}: it lost messages during the copy"
            )
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

    def judge(self, claims: Iterable[FoundCopy], originals: Mapping[int, Message]) -> dict[int, bool]:
        """Return whether each claimed copy has the content of its original, by the sequences in the target and the source.

        What the target no longer holds has no verdict. Only a message with the size of its original is read: a forged one may
        be too large for a link, and what exceeds `max_payload` has not been published by this connection.
        """
        claimed, most_bytes = {copy.at: copy for copy in claims}, self._target.max_payload_bytes
        possible = [
            copy
            for copy in claimed.values()
            if copy.payload_bytes == originals[copy.of.sequence].payload_bytes and copy.stored_bytes <= most_bytes
        ]
        small = sorted(copy.at for copy in possible if copy.stored_bytes <= self.large_bytes)
        large = [copy.at for copy in possible if copy.stored_bytes > self.large_bytes]
        lists = wire.read_sequences(self._target, self._plan.stream, small, direct=False)
        singly = (wire.stored_large(self._target, self._plan.stream, at) for at in large)
        verdicts = dict.fromkeys(claimed.keys() - {copy.at for copy in possible}, False)
        for message in filter(None, itertools.chain(itertools.chain.from_iterable(lists), singly)):
            verdicts[message.sequence] = is_copy_of(message, originals[claimed[message.sequence].of.sequence])
        return verdicts

    def is_genuine(self, stored: Message, original: Message) -> bool:
        """Return whether a message of `at` has the content of its original."""
        if not stored.unread_bytes or not is_copy_of(stored, original):
            return is_copy_of(stored, original)
        return any(self.judge(filter(None, [self._found(stored)]), {original.sequence: original}).values())

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


def ahead(items: Iterator[T]) -> Generator[T]:
    """Yield items, which are not None, while a thread gets the next one, so that the source works during the sending.

    An error of `items` is raised in its place.
    """
    with ThreadPoolExecutor(1, "fetching") as pool:
        following = pool.submit(next, items, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, items, None)
            yield item


def fetch_lane(source: wire.Connection, plan: CopyPlan) -> Iterator[tuple[list[Message], list[int]]]:
    """Yield the messages of a plan's range that match its filter, in source order; none is missing.

    Raises TransientError like `fetch`.
    """
    whole = SequenceRange(plan.first, plan.next)
    for messages in wire.read_confirmed(
        source, plan.source_stream, whole, filter_subject=plan.filter, direct=False, held=True
    ):
        _check_source(source, plan)
        yield messages, []


def fetch(
    source: wire.Connection, plan: CopyPlan, sequences: Sequence[int]
) -> Iterator[tuple[list[Message], list[int]]]:
    """Yield the messages of ascending sequences in source order, each list with the missing sequences up to its end.

    Consecutive sequences are read as a range, others one by one; the leader supplies messages that a replica lacks.
    Raises TransientError if the source has been recreated or rolled back since the batch was planned.
    """
    whole = SequenceRange(sequences[0], sequences[-1] + 1)
    if len(whole) == len(sequences):
        lists = wire.read_confirmed(
            source, plan.source_stream, whole, filter_subject=plan.filter, direct=plan.direct, held=True
        )
    else:
        lists = wire.read_sequences(source, plan.source_stream, sequences, direct=plan.direct)
    at = 0
    for messages in lists:
        _check_source(source, plan)
        held = [message.sequence for message in messages]
        after = bisect.bisect(sequences, held[-1], at)
        missing = [] if after - at == len(held) else sorted(set(sequences[at:after]).difference(held))
        at = after
        yield messages, missing
    if at < len(sequences):
        _check_source(source, plan)
        yield [], list(sequences[at:])


def _check_source(source: wire.Connection, plan: CopyPlan) -> None:
    """Raise TransientError if the source was recreated or rolled back since the batch was planned.

    Checked after the messages arrive and before they are used, because such a source holds other messages at their
    sequences. The driver diagnoses the cause.
    """
    if plan.source_sequence is None:
        return
    try:
        info = source.request_api(f"STREAM.INFO.{plan.source_stream}")
    except ApiError:
        changed = True
    else:
        last, last_ns = info["state"]["last_seq"], parse_rfc3339_ns(info["state"]["last_ts"])
        changed = parse_rfc3339_ns(info["created"]) != plan.created_ns or last < plan.source_sequence
        if not changed and (last, last_ns) != (plan.source_sequence, plan.source_ns):
            known = wire.stored_message(source, plan.source_stream, plan.source_sequence)
            changed = known is not None and known.stored_ns != plan.source_ns
    if changed:
        raise TransientError(f"source stream {plan.source_stream} was recreated or rolled back during the copy")


def _payload_bytes(messages: Iterable[Message]) -> int:
    return sum([len(message.payload) for message in messages])


class StopError(Exception):
    """The stream must stop until an operator acts; the text is the receipt's failure."""


class Sender:
    """Sends one writer's copies and accounts for them in its receipt; `on_settled` gets the acknowledged messages.

    It is the publishers' outbox: it makes the copies as they take them.
    """

    def __init__(
        self, plan: CopyPlan, target: wire.Connection, receipt: Receipt, on_settled: Callable[[list[Message]], None]
    ) -> None:
        self._plan = plan
        self._target = target
        self._receipt = receipt
        self._on_settled = on_settled
        # The messages that were not sent yet: the lists still to come, and the rest of the last one.
        self._lists: Iterator[list[Message]] = iter(())
        self._waiting = deque[Message]()
        # The messages to resend, before all others; and whether the others have to wait.
        self._again = deque[Message]()
        self._only_again = False
        # By sequence: the messages in flight or to be resent, and how often each got a new id.
        self._window: dict[int, Message] = {}
        self._resends: dict[int, int] = {}
        self._resend = plan.resend
        # When each message was first refused; the last acknowledged message, its target sequence, and when.
        self._refused_since: dict[int, float] = {}
        self._settled: Message | None = None
        self._settled_as = 0
        self._settled_at = 0.0
        self._source_failure: wire.WireError | None = None
        self.copies = TargetCopies(plan, target)
        self._guard = plan.guard
        self._takes = matcher(plan.subjects)
        # A fleet's nodes publish on few subjects, again and again.
        self._subject = lru_cache(_SUBJECTS)(self._accepted_subject)
        self._headers = header_writer(plan.replicator, plan.name, plan.source_stream, plan.created_ns)

    def send(self, lists: Iterator[list[Message]]) -> None:
        """Send the copies of all messages in order and wait for every acknowledgement.

        Raises StopError if the stream must stop, WireError if the connection is lost or the target stops responding,
        LeadershipLostError if another member may lead, and the errors of `lists`.
        """
        self._lists = lists
        waits, unanswered = 0, False
        while True:
            self._plan.check_batch()
            self._guard()
            began = times.monotonic()
            # While messages are refused or not acknowledged, none that follows them is sent: the copies stay in order.
            self._only_again = waits > 0 or unanswered
            publish = self._publish_batches if self.copies.takes_batches and not self._again else self._publish
            try:
                refused = publish()
            except wire.DeniedError as denied:
                raise StopError(str(denied)) from None
            except wire.WireError as lost:
                # No acknowledgement proves nothing about a message: its leader may have lost the quorum. Send once more.
                if lost is self._source_failure or unanswered or not self._window:
                    raise
                # The target may have stored one too long ago to recognise it as a duplicate.
                self._settle_found()
                unanswered, refused = True, []
            else:
                unanswered = False
                if not (self._only_again or refused or self._window):
                    self._confirm_stored()
                    return
            waiting = self._judge(refused)
            self._send_again()
            if not waiting:
                waits = 0
                continue
            waits = 1 if self._settled_at > began else waits + 1
            pause_seconds = backoff_seconds(
                waits, first_seconds=_FIRST_PAUSE_SECONDS, longest_seconds=_LONGEST_PAUSE_SECONDS
            )
            times.sleep(pause_seconds * random.uniform(0.5, 1.0))  # noqa: S311  jitter, not a secret

    def take(self, most: int, free_bytes: int) -> wire.Outgoings:
        """Return the next copies to send, or none after the last one: those to resend, and then those of new messages.

        A message whose subject the target does not take is parked.
        """
        messages, subjects, subject_of = list[Message](), list[str](), self._subject
        while not messages and (waiting := self._again or self._new_messages()):
            while waiting and len(messages) < most and free_bytes > 0:
                message = waiting.popleft()
                subject = subject_of(message.subject)
                if subject is None:
                    self._park_untaken(message)
                    continue
                messages.append(message)
                subjects.append(subject)
                free_bytes -= len(message.payload)
        sequences, resends, resend = [message.sequence for message in messages], self._resends, self._resend
        self._window.update(zip(sequences, messages, strict=True))
        headers = [
            self._headers(block, sequence, stored_ns, resends.get(sequence, resend) if resends else resend)
            for sequence, stored_ns, _, block, _, _ in messages
        ]
        return wire.Outgoings(sequences, subjects, headers, [message.payload for message in messages])

    def _new_messages(self) -> deque[Message]:
        """Return the messages that were not sent yet, as far as they are fetched; none if none may be sent."""
        if self._only_again:
            return self._again
        while not self._waiting:
            try:
                messages = next(self._lists, None)
            except wire.WireError as failure:
                # It is not mistaken for an error of the target.
                self._source_failure = failure
                raise
            if messages is None:
                break
            self._waiting.extend(messages)
        return self._waiting

    def _send_again(self) -> None:
        """Resend the messages that the target is not known to have stored, in order."""
        self._again = deque(self._window[sequence] for sequence in sorted(self._window))

    # --------------------------------------------------------------------------------------------- acknowledgements

    def _publish(self) -> list[wire.Ack]:
        """Publish until the first refusal, settle the acknowledged messages, and return the refusals."""
        publisher = wire.Publisher(
            self._target, stream=self._plan.stream, ack_timeout_seconds=_ACK_SECONDS, guard=self._guard
        )
        refused: list[wire.Ack] = []
        duplicates: list[wire.Ack] = []
        for outcome in publisher.publish(self):
            if isinstance(outcome, wire.Stored):
                self._settle(*outcome)
            elif outcome.error is not None:
                refused.append(outcome)
            elif outcome.duplicate:
                duplicates.append(outcome)
            else:
                self._settle([outcome.sequence], outcome.target_sequence or 0)
        # Only now: a request discards all other frames, and until here those may be acknowledgements.
        for ack in duplicates:
            self._settle_duplicate(ack)
        return refused

    def _publish_batches(self) -> list[wire.Ack]:
        """Publish in fast-ingest batches until the first refusal, and settle the stored messages; return the refusal.

        After a batch that did not end as expected, the remaining messages are published one by one.
        """
        publisher = wire.BatchPublisher(
            self._target, stream=self._plan.stream, ack_timeout_seconds=_ACK_SECONDS, guard=self._guard
        )
        self.copies.takes_batches = False
        while True:
            end = publisher.publish(self)
            clean = self._settle_batch(end)
            if end.refusal:
                return [end.refusal]
            if not clean:
                self._send_again()
                return self._publish()
            if end.exhausted:
                return []

    def _settle_batch(self, end: wire.BatchEnd) -> bool:
        """Settle the stored messages of a batch; return whether all were stored, and no others between them.

        Then they follow the target's last sequence. Otherwise only the target proves which of them it stored, and where;
        the others stay in the window.
        """
        before, count = self.copies.last, self._receipt.copied
        clean = not end.sent or (end.last is not None and end.last - before == end.stored)
        if clean:
            self.copies.last = end.last or before
            self._settle(end.sent[: end.stored], before + 1)
        else:
            self._settle_found()
        self._receipt.batched += self._receipt.copied - count
        return clean and not self._window

    def _settle_found(self) -> None:
        """Settle the messages in flight that the target holds, as its new messages prove."""
        # Read to the end first, because the contents are read on the same connection.
        ours = [copy for copy in self.copies.added() if self._is_copy_of_window(copy.of)]
        verdicts = self.copies.judge(ours, self._window)
        for copy in ours:
            if copy.at not in verdicts or copy.of.sequence not in self._window:
                continue
            if verdicts[copy.at]:
                self._settle([copy.of.sequence], copy.at)
            else:
                self._receipt.forged += 1

    def _is_copy_of_window(self, copy: CopyOf) -> bool:
        """Return whether a copy is that of a message which is in flight or waits."""
        message = self._window.get(copy.sequence)
        return message is not None and copy.stored_ms == message.stored_ns // 1_000_000

    def _settle(self, sequences: list[int], target_first: int) -> None:
        """Settle messages whose copies are consecutive in the target."""
        if not sequences:
            return
        messages, receipt = list(map(self._window.pop, sequences)), self._receipt
        receipt.count(len(messages), _payload_bytes(messages))
        if sequences[-1] - sequences[0] == len(sequences) - 1:
            receipt.locate(target_first, sequences[0], len(sequences))
        else:
            for target_sequence, sequence in enumerate(sequences, target_first):
                receipt.locate(target_sequence, sequence)
        large_bytes = self.copies.large_bytes
        for target_sequence, message in enumerate(messages, target_first):
            if message.headers or len(message.payload) > large_bytes:
                self.note_stored(target_sequence, message)
        self._on_settled(messages)
        if self._settled is None:
            reach(Point.PUBLISHING)
        self._settled, self._settled_as = messages[-1], target_first + len(messages) - 1
        self._settled_at = times.monotonic()

    def note_stored(self, target_sequence: int, message: Message) -> None:
        """Record whether a stored copy is too large to be read back for its latency, or a heartbeat."""
        receipt = self._receipt
        if len(message.payload) + len(message.headers) > self.copies.large_bytes:
            receipt.large.append(target_sequence)
        elif message.headers and is_heartbeat(message.subject, message.headers):
            receipt.heartbeats = [*receipt.heartbeats, target_sequence][-MOST_HEARTBEATS:]

    def _confirm_stored(self) -> None:
        """Raise StopError unless a target in another domain or account holds the last acknowledged copy.

        A stream of this name on the local server may accept the same subjects and acknowledge first.
        """
        target, plan = self._target, self._plan
        if self._settled is None or not target.cluster.api_owner:
            return
        stored, copy = self.copies.at(self._settled_as)
        elsewhere = copy is None or copy.sequence != self._settled.sequence
        # A stream with limits may have deleted it since.
        if elsewhere and (stored or wire.next_message(target, plan.stream, self._settled_as) is None):
            subject = printable(self._target_subject(self._settled.subject))
            raise StopError(
                f"target stream {plan.stream} ({target.cluster.api_owner}) does not hold the last acknowledged copy: another "
                f"stream also accepts {subject}; set another target_subject_prefix"
            )

    def _settle_duplicate(self, ack: wire.Ack) -> None:
        """Look up a duplicate in the target; if another message is there, resend this one with another id.

        A rolled-back source has another message at the sequence of an earlier copy. A limit may have deleted the copy since.
        """
        at, plan = ack.target_sequence or 0, self._plan
        stored, copy = self.copies.at(at)
        if stored is None and at > plan.since and self.copies.deletes:
            self._settle([ack.sequence], at)
        elif (
            stored
            and copy
            and copy.sequence == ack.sequence
            and self._is_copy_of_window(copy)
            and self.copies.is_genuine(stored, self._window[ack.sequence])
        ):
            if at <= plan.since:
                raise StopError(other_writer_text(plan.stream, plan.identity, ack.sequence))
            self._settle([ack.sequence], at)
        else:
            self._resends[ack.sequence] = self._resends.get(ack.sequence, self._resend) + 1

    # ------------------------------------------------------------------------------------- refused or unacknowledged

    def _judge(self, refused: list[wire.Ack]) -> bool:
        """Park or stop as the refusals demand; return whether to wait and send the others again."""
        now, waiting = times.monotonic(), False
        for ack in refused:
            since = self._refused_since.setdefault(ack.sequence, now)
            reason = f"{ack.error} ({ack.error_code})"
            wanted = reaction(ack.error_code, ack.error)
            if wanted is Reaction.PARK:
                self._park(self._window.pop(ack.sequence), reason)
            elif wanted is Reaction.STOP or now - max(since, self._settled_at) > _REFUSAL_SECONDS:
                raise StopError(f"target stream {self._plan.stream} refuses: {reason}")
            else:
                waiting = True
        return waiting

    # ------------------------------------------------------------------------------------------------- single messages

    def _target_subject(self, subject: str) -> str:
        return target_subject(subject, self._plan.prefix, self._plan.remove)

    def _accepted_subject(self, subject: str) -> str | None:
        """Return the subject of a message's copy, or None if the target does not take it."""
        copied_as = self._target_subject(subject)
        return copied_as if self._takes(copied_as) else None

    def _park_untaken(self, message: Message) -> None:
        subject = printable(self._target_subject(message.subject))
        self._park(message, f"target stream {self._plan.stream} does not take subject {subject}")

    def _park(self, message: Message, reason: str) -> None:
        if self._plan.on_poison == "stop":
            raise StopError(
                f"message {message.sequence} cannot be copied: {reason}; set on_poison: park to continue without it"
            )
        subject, parked = printable(message.subject), self._receipt.parked
        if len(parked) >= _WHOLE_TEXTS:
            subject, reason = subject[:_MOST_LETTERS], reason[:_MOST_LETTERS]
        parked.append(Parked(message.sequence, message.stored_ns, subject, len(message.payload), reason))


class Copier:
    """Copies the messages in `rows`; without them, a lane's messages.

    It publishes in source order with a bounded window and awaits every acknowledgement. It first reads the copies that an
    earlier attempt left in the target, so a repetition stores no duplicates.
    """

    def __init__(self, plan: CopyPlan, rows: Rows | None, partition: int) -> None:
        self._plan = plan
        self._rows = rows
        self._sequences = rows if isinstance(rows, range) else sorted(rows or ())
        self._check = lane_check(plan.source_stream, plan.lanes)
        self._receipt = Receipt()
        self._staged = StagedFiles(Path(plan.staging), partition, plan.metadata_bytes) if plan.staging else None
        # Messages that the target has stored and that are not in the staged files yet.
        self._copied: list[Message] = []
        self._copied_bytes = 0
        # The copies in the target by source sequence: target sequence and the original's stored time in ms.
        self._found: dict[int, tuple[int, int]] = {}
        # Source sequences of copies whose originals the source no longer holds.
        self._orphans: list[int] = []

    def run(self) -> Receipt:
        """Copy all messages and return the receipt.

        Raises WireError if a connection is lost, and RunError if the target holds another writer's copies or a message has
        no outcome. Then there is no receipt, and the next attempt finds this one's copies in the target.
        """
        plan = self._plan
        with contextlib.ExitStack() as stack:
            source = stack.enter_context(open_connection(plan.source_connection, "sr-assets writer: source"))
            abrupt = bool(plan.fence or plan.vanished_ms)
            target = stack.enter_context(
                open_connection(plan.connection, _TARGET, abrupt=abrupt, vanished_ms=plan.vanished_ms)
            )
            if self._staged:
                stack.enter_context(self._staged)
            sender = Sender(plan, target, self._receipt, self._stage)
            if outside := self._find_copies(sender, source):
                raise RunError(other_writer_text(plan.stream, plan.identity, outside[0]))
            # Closed before the connections, because a thread may be fetching: an error of the target waits for it.
            messages = stack.enter_context(contextlib.closing(self._messages(source, sender)))
            try:
                sender.send(messages)
            except StopError as stop:
                self._receipt.failure = str(stop)
            self._take_orphans(target)
            self._measure(target)
        self._note_refused()
        if self._rows is not None and not self._receipt.failure and self._receipt.outcomes != len(self._rows):
            counts = f"{self._receipt.outcomes:,} of {len(self._rows):,} messages"
            raise RunError(
                f"{plan.source_stream}: a writer returned the outcomes of only {counts}; the batch is repeated"
            )
        return self._receipt

    def settle(self) -> Receipt:
        """Account for the copies of an earlier attempt without copying more: the source has been replaced since."""
        with contextlib.ExitStack() as stack:
            target = stack.enter_context(open_connection(self._plan.connection, _TARGET))
            if self._staged:
                stack.enter_context(self._staged)
            self._find_copies(Sender(self._plan, target, self._receipt, self._stage))
            self._note_missing(list(self._sequences))
            self._take_orphans(target)
        self._note_refused()
        return self._receipt

    def _note_refused(self) -> None:
        if self._staged:
            self._receipt.refused_metadata = self._staged.refused

    def _find_copies(self, sender: Sender, source: wire.Connection | None = None) -> list[int]:
        """Record the copies that the target has stored since the intent; return the lowest one outside of the batch.

        With the source, a message that differs from its original is no copy. One whose original the source no longer holds
        counts, unless it is outside of the batch.
        """
        plan = self._plan
        batch = SequenceRange(min(plan.first, plan.whole[0] or plan.first), max(plan.next, plan.whole[1]))
        outside: list[int] = []
        # Read to the end first, because the contents are read on the same connection.
        copies = [copy for copy in sender.copies.found() if self._concerns(copy.of.sequence)]
        if source is not None:
            genuine = self._genuine(copies, sender, source, batch)
            copies = [copy for copy in copies if copy.at in genuine]
        for target_sequence, copy, *_ in copies:
            if not plan.first <= copy.sequence < plan.next:
                if copy.sequence not in batch:
                    outside = [min([copy.sequence, *outside])]
                continue
            self._found[copy.sequence] = target_sequence, copy.stored_ms
            if self._rows is not None:
                self._receipt.locate(target_sequence, copy.sequence)
        return outside

    def _concerns(self, sequence: int) -> bool:
        """Return whether this writer accounts for a copy; those of the batch's other writers are theirs."""
        return self._rows is None or sequence in self._rows or not self._plan.first <= sequence < self._plan.next

    def _genuine(
        self, copies: list[FoundCopy], sender: Sender, source: wire.Connection, batch: SequenceRange
    ) -> set[int]:
        """Return the target sequences of the found copies without forged ones, which are counted, and without lost ones."""
        plan, claims = self._plan, defaultdict[int, list[FoundCopy]](list)
        for copy in copies:
            claims[copy.of.sequence].append(copy)
        genuine, lost = {copy.at for copy in copies if copy.of.sequence in batch}, 0
        for messages in self._originals(sorted(claims), source):
            originals = {message.sequence: message for message in messages if message.sequence in claims}
            same_time = []
            for sequence, original in originals.items():
                for copy in claims[sequence]:
                    genuine.discard(copy.at)
                    if copy.of.stored_ms == original.stored_ns // 1_000_000:
                        same_time.append(copy)
                    elif plan.source_sequence is None or copy.at <= plan.since:
                        # The source has changed since the plan, or a later state has made the copy.
                        genuine.add(copy.at)
            verdicts = sender.copies.judge(same_time, originals)
            genuine |= {at for at, is_genuine in verdicts.items() if is_genuine}
            lost += len(same_time) - len(verdicts)
        self._receipt.forged += len(copies) - len(genuine) - lost
        return genuine

    def _originals(self, sequences: list[int], source: wire.Connection) -> Iterator[list[Message]]:
        """Yield the originals of ascending sequences, as far as the source holds them.

        A lane reads the originals of its batch by its filter, which also yields other messages between them.
        """
        plan = self._plan
        if self._rows is None:
            low, high = (bisect.bisect_left(sequences, end) for end in (plan.first, plan.next))
            if low < high:
                claimed = SequenceRange(sequences[low], sequences[high - 1] + 1)
                yield from wire.read_confirmed(
                    source, plan.source_stream, claimed, filter_subject=plan.filter, direct=False
                )
            sequences = sequences[:low] + sequences[high:]
        yield from wire.read_sequences(source, plan.source_stream, sequences, direct=plan.direct)

    def _messages(self, source: wire.Connection, sender: Sender) -> Generator[list[Message]]:
        """Yield the messages to copy; account for the others."""
        plan, receipt = self._plan, self._receipt
        lists = fetch_lane(source, plan) if self._rows is None else fetch(source, plan, self._sequences)
        for messages, missing in ahead(lists):
            plan.check_batch()
            if self._rows is None:
                receipt.hold([message.sequence for message in messages])
            self._check(messages)
            if messages:
                receipt.last_sequence, receipt.last_stored_ns, *_ = messages[-1]
            yield self._without_found(self._without_old(messages), sender)
            self._note_missing(missing)

    def _without_old(self, messages: list[Message]) -> list[Message]:
        """Return the messages that are not too old, and count the others."""
        cutoff_ns, receipt = self._plan.cutoff_ns, self._receipt
        if cutoff_ns is None:
            return messages
        young = [message for message in messages if untracked(message.stored_ns, cutoff_ns, ALL).copy]
        receipt.too_old += len(messages) - len(young)
        receipt.too_old_bytes += _payload_bytes(messages) - _payload_bytes(young)
        return young

    def _without_found(self, messages: list[Message], sender: Sender) -> list[Message]:
        """Return the messages without a copy in the target, and account for the others."""
        if not self._found:
            return messages
        receipt, new = self._receipt, list[Message]()
        for message in messages:
            if not self._is_copied(message):
                new.append(message)
                continue
            target_sequence, _ = self._found[message.sequence]
            receipt.count(1, len(message.payload))
            receipt.found += 1
            sender.note_stored(target_sequence, message)
            if self._rows is None:
                receipt.locate(target_sequence, message.sequence)
            self._stage([message])
        return new

    def _stage(self, messages: list[Message]) -> None:
        """Queue copied messages for the history; parked messages are not part of it."""
        if self._staged and isinstance(nodes := self._rows, Mapping):
            tracked = [message for message in messages if nodes[message.sequence] is not None]
            self._copied += tracked
            self._copied_bytes += _payload_bytes(tracked)
            if len(self._copied) >= _STAGED_AT_ONCE or self._copied_bytes >= _STAGED_BYTES:
                self._stage_copied()

    def _stage_copied(self) -> None:
        if self._staged and self._copied and isinstance(nodes := self._rows, Mapping):
            self._staged.add(self._copied, nodes)
            self._copied, self._copied_bytes = [], 0

    def _take_orphans(self, target: wire.Connection) -> None:
        """Stage and count messages that only the target still holds; a copy's header has the original's time in ms."""
        originals = {self._found[sequence][0]: sequence for sequence in self._orphans}
        for copies in wire.read_sequences(target, self._plan.stream, sorted(originals), direct=False):
            for copy in copies:
                sequence = originals[copy.sequence]
                stored_ns = self._found[sequence][1] * 1_000_000
                subject = source_subject(copy.subject, self._plan.prefix)
                self._receipt.copied_bytes += len(copy.payload)
                self._stage([copy._replace(sequence=sequence, stored_ns=stored_ns, subject=subject)])
        self._stage_copied()

    def _measure(self, target: wire.Connection) -> None:
        """Read a few copies back: their headers and stored times tell the latency of this hop and of all earlier ones."""
        receipt, wanted = self._receipt, self._receipt.measured()
        # A copy that cannot be read now is not measured; the batch does not depend on it.
        with contextlib.suppress(SrAssetsError):
            for copies in wire.read_sequences(target, self._plan.stream, wanted, direct=False):
                for copy in copies:
                    heartbeat = copy.sequence in receipt.heartbeats
                    measured, impossible = hops(copy.headers, copy.payload, copy.stored_ns, heartbeat=heartbeat)
                    receipt.hops += measured
                    receipt.impossible_hops += impossible

    def _is_copied(self, message: Message) -> bool:
        """Return whether the target holds a copy of a message.

        Raises RunError if an earlier attempt at this batch has copied another message with its sequence. Such a copy of a
        later state is no error: the source was rolled back after this state, and the copy belongs to its lost messages.
        """
        plan = self._plan
        if message.sequence not in self._found:
            return False
        target_sequence, stored_ms = self._found[message.sequence]
        if stored_ms == message.stored_ns // 1_000_000:
            return True
        if target_sequence > plan.since:
            raise RunError(
                f"source stream {plan.source_stream} holds another message {message.sequence} than the one that was copied"
                f" into {plan.stream} before the batch was interrupted: the source was rolled back; run `sr-assets recover"
                f" --stream {plan.name}/{plan.source_stream} --force`"
            )
        return False

    def _note_missing(self, missing: list[int]) -> None:
        """Account for sequences that the source does not hold: either copied by an earlier attempt or lost."""
        if not missing:
            return
        receipt = self._receipt
        lost = [SequenceRange(sequence, sequence + 1) for sequence in missing if sequence not in self._found]
        orphans = [sequence for sequence in missing if sequence in self._found]
        self._orphans += orphans
        receipt.copied += len(orphans)
        receipt.found += len(orphans)
        if lost:
            known = [SequenceRange(first, after) for first, after in receipt.missing]
            receipt.missing = [(hole.first, hole.next) for hole in merge_ranges([*known, *lost])]


def write_copies(plan: CopyPlan, rows: Rows, partition: int = 0, *, made: bool = False) -> Receipt:
    """Copy the messages in `rows` as one writer: in a task, or in the run itself.

    With `by_lane` of the plan, `rows` are lanes, each with a writer of its own.

    `made`: only account for the copies of an earlier attempt. Raises WireError if a connection is lost, RunError if
    rows cannot be staged.
    """
    if not rows:
        return Receipt()
    if not plan.by_lane:
        return _write(plan, rows, partition, made=made)
    total = Receipt()
    # A task gets several lanes if they outnumber the cores; each active one has two connections.
    with ThreadPoolExecutor(min(len(rows), _LANES_AT_ONCE)) as pool:
        for receipt in pool.map(lambda lane: _write(replace(plan, filter=plan.lanes[lane]), None, lane), sorted(rows)):
            total.add(receipt)
    return total


def _write(plan: CopyPlan, rows: Rows | None, partition: int, *, made: bool = False) -> Receipt:
    with _writer_lock(Path(plan.folder) / f"writer-{partition}.lock"), gc_paused():
        try:
            copier = Copier(plan, rows, partition)
            return copier.settle() if made else copier.run()
        except OSError as error:
            # About a staged file or our own files; a connection has its own error.
            raise RunError(cannot_write(plan.staging or plan.folder, error)) from None


def writers_at_work(folder: Path) -> bool:
    """Return whether an earlier writer is active in a stream's folder."""
    for file in folder.glob("writer-*.lock"):
        with file.open("a") as handle:
            if not lock(handle):
                return True
    return False


def await_writers(folder: Path) -> None:
    """Wait until no earlier writer is active in a stream's folder; raises RunError after a minute."""
    for file in folder.glob("writer-*.lock"):
        with _writer_lock(file):
            pass


@contextlib.contextmanager
def _writer_lock(file: Path) -> Iterator[None]:
    """Hold a writer's lock, which the kernel releases at its holder's end; raises RunError after a minute."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+") as handle:
        if not lock(handle, _LOCK_SECONDS):
            raise RunError(f"an earlier writer still holds {file}; run `sr-assets spark stop`")
        yield
