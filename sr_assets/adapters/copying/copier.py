"""One writer's work on a batch: find earlier copies in the target, fetch, send, stage and account.

A message that the source has lost since it was copied is staged from the target.
"""

import contextlib
import itertools
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Final

from sr_assets.adapters import wire
from sr_assets.adapters.connection_file import open_connection
from sr_assets.adapters.copying.fetching import ahead, fetch, fetch_lane
from sr_assets.adapters.copying.plan import CopyPlan
from sr_assets.adapters.copying.receipt import Receipt
from sr_assets.adapters.copying.sending import Sender, StopError
from sr_assets.adapters.copying.target_copies import FoundCopy
from sr_assets.adapters.published.history import StagedFiles
from sr_assets.domain.errors import RunError, SrAssetsError
from sr_assets.domain.heartbeats import hops
from sr_assets.domain.lanes import lane_check
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange, merge_ranges
from sr_assets.domain.provenance import other_writer_text
from sr_assets.domain.subjects import source_subject
from sr_assets.domain.tracking.rules import ALL, untracked

_TARGET: Final = "sr-assets writer: target"
_STAGED_AT_ONCE: Final = 500
_CONFIRMED_AT_ONCE: Final = 64
_STAGED_BYTES: Final = 8 << 20


class Copier:
    """Copies the messages in `rows`: source sequence → node, None for an untracked sender. Without `rows`: a lane's
    messages.

    It publishes in source order with a bounded window and awaits every acknowledgement. It first reads the copies that an
    earlier attempt left in the target, so a repetition stores no duplicates.
    """

    def __init__(self, plan: CopyPlan, rows: Mapping[int, str | None] | None, partition: int) -> None:
        self._plan = plan
        self._rows = None if rows is None else dict(sorted(rows.items()))
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
            outgoing = stack.enter_context(contextlib.closing(self._prepare(source, sender)))
            try:
                sender.send(outgoing)
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
            self._note_missing(list(self._rows or ()))
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
        first, after = min(plan.first, plan.whole[0] or plan.first), max(plan.next, plan.whole[1])
        outside: list[int] = []
        # Read to the end first, because the contents are read on the same connection.
        copies = iter([*sender.copies.found()])
        if source is not None:
            copies = self._genuine(copies, sender, source, first, after)
        for target_sequence, copy, *_ in copies:
            if not plan.first <= copy.sequence < plan.next:
                if not first <= copy.sequence < after:
                    outside = [min([copy.sequence, *outside])]
                continue
            self._found[copy.sequence] = target_sequence, copy.stored_ms
            if self._rows is not None:
                self._receipt.locate(target_sequence, copy.sequence)
        return outside

    def _genuine(
        self, copies: Iterator[FoundCopy], sender: Sender, source: wire.Connection, first: int, after: int
    ) -> Iterator[FoundCopy]:
        """Yield the found copies without forged ones; `first` and `after` bound the batch."""
        plan = self._plan
        while portion := list(itertools.islice(copies, _CONFIRMED_AT_ONCE)):
            wanted = sorted({copy.of.sequence for copy in portion})
            lists = wire.read_sequences(source, plan.source_stream, wanted, direct=plan.direct)
            originals = {message.sequence: message for messages in lists for message in messages}
            genuine = sender.copies.genuine([copy for copy in portion if copy.of.sequence in originals], originals)
            for copy in portion:
                original = originals.get(copy.of.sequence)
                if original is None:
                    forged = not first <= copy.of.sequence < after
                elif copy.of.stored_ms != original.stored_ns // 1_000_000:
                    # The source has not changed since the plan, or a later state has made the copy.
                    forged = plan.source_sequence is not None and copy.at > plan.since
                else:
                    forged = copy.at not in genuine
                self._receipt.forged += forged
                if not forged:
                    yield copy

    def _prepare(self, source: wire.Connection, sender: Sender) -> Generator[wire.Outgoing]:
        """Yield the messages to send; account for the others."""
        plan, receipt, earlier, prepare = self._plan, self._receipt, self._found, sender.prepare
        cutoff_ns = plan.cutoff_ns
        lists = fetch_lane(source, plan) if self._rows is None else fetch(source, plan, list(self._rows))
        for messages, missing in ahead(lists):
            plan.check_batch()
            if self._rows is None:
                receipt.hold([message.sequence for message in messages])
            self._check(messages)
            if messages:
                receipt.last_sequence, receipt.last_stored_ns, *_ = messages[-1]
            for message in messages:
                if cutoff_ns is not None and not untracked(message.stored_ns, cutoff_ns, ALL).copy:
                    receipt.too_old += 1
                    receipt.too_old_bytes += len(message.payload)
                    continue
                if earlier and self._is_copied(message):
                    receipt.count(1, len(message.payload))
                    receipt.found += 1
                    sender.note_stored(earlier[message.sequence][0], message)
                    if self._rows is None:
                        receipt.locate(earlier[message.sequence][0], message.sequence)
                    self._stage([message])
                elif (outgoing := prepare(message)) is not None:
                    yield outgoing
            self._note_missing(missing)

    def _stage(self, messages: list[Message]) -> None:
        """Queue copied messages for the history; parked messages are not part of it."""
        if self._staged and (rows := self._rows):
            tracked = [message for message in messages if rows[message.sequence] is not None]
            self._copied += tracked
            self._copied_bytes += sum([len(message.payload) for message in tracked])
            if len(self._copied) >= _STAGED_AT_ONCE or self._copied_bytes >= _STAGED_BYTES:
                self._stage_copied()

    def _stage_copied(self) -> None:
        if self._staged and self._rows and self._copied:
            self._staged.add(self._copied, self._rows)
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
