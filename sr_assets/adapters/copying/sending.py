"""Publishing of copies into a target, and the handling of refused and unacknowledged messages.

A refused or unacknowledged message is sent again. Only a message that the target can never store is parked, as
`domain/refusals.py` decides. Any other refusal that lasts ends the stream's run with its intent open.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Final

from sr_assets.adapters import times, wire
from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.copying.plan import CopyPlan
from sr_assets.adapters.copying.receipt import MOST_HEARTBEATS, Parked, Receipt
from sr_assets.adapters.copying.target_copies import TargetCopies
from sr_assets.domain.backoff import backoff_seconds
from sr_assets.domain.heartbeats import is_heartbeat
from sr_assets.domain.messages import Message, header_writer
from sr_assets.domain.provenance import CopyOf, other_writer_text
from sr_assets.domain.refusals import Reaction, reaction
from sr_assets.domain.subjects import matcher, printable, target_subject

_REFUSAL_SECONDS: Final = 30.0
_ACK_SECONDS: Final = 30.0
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 5.0
#: After so many parked messages of a batch, subjects and reasons are shortened: a publisher chooses them.
_WHOLE_TEXTS: Final = 1000
_MOST_LETTERS: Final = 200
_SUBJECTS: Final = 1 << 16
_SETTLED_AT_ONCE: Final = 500
_CONFIRMED_AT_ONCE: Final = 64


class StopError(Exception):
    """The stream must stop until an operator acts; the text is the receipt's failure."""


class Sender:
    """Sends one writer's copies and accounts for them in its receipt; `on_settled` gets the acknowledged messages."""

    def __init__(
        self, plan: CopyPlan, target: wire.Connection, receipt: Receipt, on_settled: Callable[[list[Message]], None]
    ) -> None:
        self._plan = plan
        self._target = target
        self._receipt = receipt
        self._on_settled = on_settled
        # By sequence: the messages in flight or waiting to be resent, and how often each got a new id.
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
        # A fleet's nodes publish on few subjects, again and again.
        self._subject = lru_cache(_SUBJECTS)(partial(target_subject, prefix=plan.prefix, remove=plan.remove))
        self._takes = lru_cache(_SUBJECTS)(matcher(plan.subjects))
        self._headers = header_writer(plan.replicator, plan.name, plan.source_stream, plan.created_ns)

    def prepare(self, message: Message) -> wire.Outgoing | None:
        """Return the copy, which the caller must send, or None if the target does not accept its subject."""
        outgoing = self._outgoing(message)
        if not self._takes(outgoing[1]):
            subject = printable(outgoing.subject)
            self._park(message, f"target stream {self._plan.stream} does not take subject {subject}")
            return None
        self._window[outgoing[0]] = message
        return outgoing

    def send(self, items: Iterator[wire.Outgoing]) -> None:
        """Send all items in order and wait for every acknowledgement.

        Raises StopError if the stream must stop, WireError if the connection is lost or the target stops responding,
        LeadershipLostError if another member may lead, and the errors of `items`.
        """
        items = self._watch(items)
        waits, unanswered = 0, False
        again: list[wire.Outgoing] = []
        while True:
            self._plan.check_batch()
            self._guard()
            began = times.monotonic()
            # While messages are refused or not acknowledged, none that follows them is sent: the copies stay in order.
            resends = waits > 0 or unanswered
            try:
                if self.copies.takes_batches and not again:
                    refused = self._publish_batches(items)
                else:
                    refused = self._publish(again if resends else itertools.chain(again, items))
            except wire.DeniedError as denied:
                raise StopError(str(denied)) from None
            except wire.WireError as lost:
                # No acknowledgement proves nothing about a message: its leader may have lost the quorum. Send once more.
                if lost is self._source_failure or unanswered or not self._window:
                    raise
                unanswered, refused = True, []
            else:
                unanswered = False
                if not (resends or refused or self._window):
                    self._confirm_stored()
                    return
            waiting = self._judge(refused)
            again = self._unsettled()
            if not waiting:
                waits = 0
                continue
            waits = 1 if self._settled_at > began else waits + 1
            pause_seconds = backoff_seconds(
                waits, first_seconds=_FIRST_PAUSE_SECONDS, longest_seconds=_LONGEST_PAUSE_SECONDS
            )
            times.sleep(pause_seconds * random.uniform(0.5, 1.0))  # noqa: S311  jitter, not a secret

    def _watch(self, items: Iterator[wire.Outgoing]) -> Iterator[wire.Outgoing]:
        """Record an error of the source, so that it is not mistaken for an error of the target."""
        try:
            yield from items
        except wire.WireError as failure:
            self._source_failure = failure
            raise

    # --------------------------------------------------------------------------------------------- acknowledgements

    def _publish(self, items: Iterable[wire.Outgoing]) -> list[wire.Ack]:
        """Publish until the first refusal, settle the acknowledged messages, and return the refusals."""
        publisher = wire.Publisher(
            self._target, stream=self._plan.stream, ack_timeout_seconds=_ACK_SECONDS, guard=self._guard
        )
        refused: list[wire.Ack] = []
        duplicates: list[wire.Ack] = []
        settled = self._settled
        # The copies that are consecutive in the target, from `first` on.
        first, sequences = 0, list[int]()
        try:
            for ack in publisher.publish_all(items):
                sequence, stored_as, duplicate, _, error = ack
                if error is not None:
                    refused.append(ack)
                elif duplicate:
                    duplicates.append(ack)
                elif self._settled and stored_as == first + len(sequences) and len(sequences) < _SETTLED_AT_ONCE:
                    sequences.append(sequence)
                else:
                    # The next run begins first: if the settling fails, `finally` must not settle this one again.
                    ended = sequences, first
                    first, sequences = stored_as or 0, [sequence]
                    self._settle(*ended)
        finally:
            self._settle(sequences, first)
            if self._settled is not settled:
                self._settled_at = times.monotonic()
        # Only now: a request discards all other frames, and until here those may be acknowledgements.
        for ack in duplicates:
            self._settle_duplicate(ack)
        return refused

    def _publish_batches(self, items: Iterator[wire.Outgoing]) -> list[wire.Ack]:
        """Publish in fast-ingest batches until the first refusal, and settle the stored messages; return the refusal.

        After a batch that did not end as expected, the remaining messages are published one by one.
        """
        publisher = wire.BatchPublisher(
            self._target, stream=self._plan.stream, ack_timeout_seconds=_ACK_SECONDS, guard=self._guard
        )
        self.copies.takes_batches = False
        while True:
            end = publisher.publish(items)
            clean = self._settle_batch(end)
            if end.refusal:
                return [end.refusal]
            if not clean:
                return self._publish(itertools.chain(self._unsettled(), items))
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
            # Read to the end first, because the contents are read on the same connection.
            added = iter([*self.copies.added()])
            while portion := list(itertools.islice(added, _CONFIRMED_AT_ONCE)):
                ours = [copy for copy in portion if self._is_copy_of_window(copy.of)]
                genuine = self.copies.genuine(ours, self._window)
                for copy in ours:
                    if copy.of.sequence not in self._window:
                        continue
                    if copy.at in genuine:
                        self._settle([copy.of.sequence], copy.at)
                    else:
                        self._receipt.forged += 1
        self._receipt.batched += self._receipt.copied - count
        self._settled_at = times.monotonic()
        return clean and not self._window

    def _is_copy_of_window(self, copy: CopyOf) -> bool:
        """Return whether a copy is that of a message which is in flight or waits."""
        message = self._window.get(copy.sequence)
        return message is not None and copy.stored_ms == message.stored_ns // 1_000_000

    def _settle(self, sequences: list[int], target_first: int) -> None:
        """Settle messages whose copies are consecutive in the target."""
        if not sequences:
            return
        messages, receipt = list(map(self._window.pop, sequences)), self._receipt
        receipt.count(len(messages), sum([len(message.payload) for message in messages]))
        if sequences[-1] - sequences[0] == len(sequences) - 1:
            receipt.locate(target_first, sequences[0], len(sequences))
        else:
            for target_sequence, sequence in enumerate(sequences, target_first):
                receipt.locate(target_sequence, sequence)
        for target_sequence, message in enumerate(messages, target_first):
            self.note_stored(target_sequence, message)
        self._on_settled(messages)
        if self._settled is None:
            reach(Point.PUBLISHING)
        self._settled, self._settled_as = messages[-1], target_first + len(messages) - 1

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
            subject = printable(self._outgoing(self._settled).subject)
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

    def _outgoing(self, message: Message) -> wire.Outgoing:
        """Return the copy: its subject, headers and payload."""
        sequence, stored_ns, subject, headers, payload, _ = message
        resend = self._resends.get(sequence, self._resend) if self._resends else self._resend
        copy = (sequence, self._subject(subject), self._headers(headers, sequence, stored_ns, resend), payload)
        # Half the time of the constructor.
        return tuple.__new__(wire.Outgoing, copy)

    def _unsettled(self) -> list[wire.Outgoing]:
        """Return the messages that the target is not known to have stored, in order."""
        return [self._outgoing(self._window[sequence]) for sequence in sorted(self._window)]

    def _park(self, message: Message, reason: str) -> None:
        if self._plan.on_poison == "stop":
            raise StopError(
                f"message {message.sequence} cannot be copied: {reason}; set on_poison: park to continue without it"
            )
        subject, parked = printable(message.subject), self._receipt.parked
        if len(parked) >= _WHOLE_TEXTS:
            subject, reason = subject[:_MOST_LETTERS], reason[:_MOST_LETTERS]
        parked.append(Parked(message.sequence, message.stored_ns, subject, len(message.payload), reason))
