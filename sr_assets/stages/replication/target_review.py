"""Our copies in the target since the last batch; some may be those of a later state, which this older one adopts.

What may have happened to the target:

- *replaced*: the target has another name.
- *recreated*: it has another created time.
- *rolled back* (a power failure, a restored disk): it ends before an acknowledged copy, or holds another message there.
- *purged* or expired: only the first sequence moved; nothing follows.
- *another writer*: it holds copies that no batch of this run made; the stream stops. Copies from before the run count as
  made.

An older state, such as a checkpoint, reads the messages of adopted copies again and makes the same decisions; each batch then
finds its copies and makes only the missing ones.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from sr_assets.adapters import times, wire
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.progress_lines import LongWork
from sr_assets.adapters.published.history import copied_sequences, source_mark, stream_folder
from sr_assets.adapters.state.records import CopyState, Intent, StreamState
from sr_assets.adapters.state.stream_tables import Counter, gap_row
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange, merge_ranges, missing
from sr_assets.domain.provenance import CopyOf, find_copy, forged_text, other_writer_text
from sr_assets.stages.replication.context import CopyContext
from sr_assets.stages.replication.found_copies import Copy, FoundCopies
from sr_assets.stages.replication.target_copies import claimed_copies, first_genuine
from sr_assets.stages.replication.target_setup import copies_pattern, create_target, prepare_target
from sr_assets.stages.source.position import ends_before, refuse_isolated
from sr_assets.stages.source.source_reading import save_gaps
from sr_assets.stages.tracking.node_snapshots import staging_folder

logger = logging.getLogger(__name__)

#: A server that fell behind, or a new leader, may first return an old state: the info is verified for this long.
_OLD_ANSWERS_SECONDS: Final = 5.0
_CONFIRMED_AT_ONCE: Final = 64
_CLIENT: Final = "sr-assets review"


class TargetReview:
    """A comparison of the target with the state; `target` is its info, or None if it does not exist."""

    def __init__(
        self,
        context: CopyContext,
        source: StreamInfo,
        state: StreamState,
        copying: CopyState,
        target: StreamInfo | None,
    ) -> None:
        self._context, self._source, self._state, self._copying, self._target = context, source, state, copying, target
        self._stream, self._store = context.stream, context.store
        self._log = self._store.copy_log(self._stream.stream)

    def changed(self) -> bool:
        """Return whether a target with our copies seems deleted, recreated, or to end before our last copy."""
        copying, target = self._copying, self._target
        if target is None:
            return True
        if not copying.target_created_ns:
            return False
        return target.created_ns != copying.target_created_ns or target.last_sequence < copying.target_sequence

    def run(self) -> StreamInfo:
        """Compare, commit the required resends, and return the target's info; a missing target is created.

        Raises RunError if the stream must stop: `on_target_reset: stop`, or another writer's copies.
        """
        stream, copying = self._stream, self._copying
        self._confirm()
        renamed = copying.target_stream not in (None, stream.target_stream)
        target = self._target
        if copying.target_created_ns and (renamed or target is None or target.created_ns != copying.target_created_ns):
            self._follow_new_target(renamed=renamed)
        elif target is not None and copying.target_sequence and self._rolled_back(target):
            self._note_rollback(target)
        if target is None:
            target = self._target = self._create()
        # An open batch may belong to a target that was deleted before a commit, or created since.
        intents = [self._store.open_intent(stream.stream, resend=resend) for resend in (False, True)]
        for intent in filter(None, intents):
            self._follow_lost_end(intent, target)
        if any(intent is not None and intent.target_created_ns != target.created_ns for intent in intents):
            chosen = any(intent and intent.target_stream not in (None, stream.target_stream) for intent in intents)
            end = target.last_sequence if chosen else 0
            with self._store.transaction():
                again = bool(self._log.resends(1))
                self._move_intents(created_ns=target.created_ns, target_sequence=end, waits=again)
        return target

    def _follow_lost_end(self, intent: Intent, target: StreamInfo) -> None:
        """Commit where an open batch's copies may begin, in a target that has lost its end, perhaps of other writers."""
        within = within_target(self._context, intent, target)
        if within != intent:
            with self._store.transaction():
                self._store.save_intent(within)

    def _create(self) -> StreamInfo:
        source, target = map(self._context.clusters.connect, (self._stream.source, self._stream.target))
        return create_target(self._stream, self._source, source, target)

    def _confirm(self) -> None:
        """Repeat the query for some seconds while the response differs from the state."""
        cluster = self._context.clusters.connect(self._stream.target)
        deadline = times.monotonic() + _OLD_ANSWERS_SECONDS
        while self._copying.target_created_ns and self.changed() and times.monotonic() < deadline:
            times.sleep(0.5)
            self._target = prepare_target(self._stream, self._source, cluster)
        if self._target is not None and self.changed():
            refuse_isolated(self._target)

    def refuse_other_writer(self) -> None:
        """Stop if the target has copies of ours after the last one that was adopted or that a batch of this run made.

        Each other message is read only once: `target_checked` advances with the next intent. On a target of many sites,
        messages with other sites' subjects are not read at all, unless the target rewrites subjects.
        """
        copying, target = self._copying, self._target
        assert target is not None
        checked = max(copying.target_checked, copying.target_sequence)
        behind = SequenceRange(checked + 1, max(checked, target.last_sequence) + 1)
        if not self._stream.ephemeral and copying.target_created_ns and len(behind):
            forged = 0
            copies = self._read_claims(behind, copies_pattern(self._stream, target))
            while portion := list(itertools.islice(copies, _CONFIRMED_AT_ONCE)):
                # Another writer copies what the source holds, so a copy without an original proves none.
                if (genuine := first_genuine(self._stream, portion)) is not None:
                    raise RunError(other_writer_text(self._stream.target_stream, self._stream.identity, genuine[1]))
                forged += len(portion)
            if forged:
                logger.error("%s: %s", self._stream.label, forged_text(self._stream.target_stream, forged))
        copying.target_checked = max(copying.target_checked, target.last_sequence)

    def lost_copies(self) -> list[SequenceRange]:
        """Commit which copies the target has lost; return the sequences of those not yet sent again."""
        copying, target = self._copying, self._target
        if target is None or target.created_ns != copying.target_created_ns:
            return []
        if copying.target_sequence and self._rolled_back(target):
            self._note_rollback(target)
        made: set[int] = set()
        if self._store.open_intent(self._stream.stream, resend=True):
            behind = SequenceRange(copying.target_sequence + 1, max(copying.target_sequence, target.last_sequence) + 1)
            made = {copy.sequence for _, copy in self._read_claims(behind) if not copy.is_before(copying.starts)}
        lost = (resend.covered for resend in self._log.resends() if resend.was_copied)
        return [part for hole in lost for part in missing(hole, sorted(made))]

    def restart(self, lost: Sequence[SequenceRange]) -> None:
        """Forget the earlier copies, inside the caller's transaction: the next ones belong to another source or restart.

        `lost` are the `lost_copies`, which no longer have an original. The caller commits `copying`.
        """
        stream, copying, store = self._stream, self._copying, self._store
        if lost:
            count, now_ns = sum(map(len, lost)), self._context.clock.now_ns()
            copying.copied_messages -= count
            copying.lost_messages += count
            gaps = [gap_row(stream.stream, hole, len(hole), "lost", now_ns) for hole in lost]
            save_gaps(store, stream, gaps, self._context.report)
            store.counters(stream.stream).add({Counter.RECALLED_MESSAGES: count})
            self._context.report.gap_messages += count
            logger.error("%s: %d copies that the target lost are lost with their source", stream.label, count)
        self._log.clear()
        for resend in (False, True):
            intent = store.open_intent(stream.stream, resend=resend)
            if intent is not None and (resend or not stream.tracked):
                store.clear_intent(stream.stream, resend=resend)

    def _read_claims(self, held: SequenceRange, subjects: str | None = None) -> Iterator[tuple[Message, CopyOf]]:
        """Yield the messages with the headers of this entry's copies in a range of the target, without payloads."""
        with wire.Connection(self._stream.target, _CLIENT) as connection:
            yield from claimed_copies(connection, self._stream, held, subjects, self._copying.created_ns)

    # ------------------------------------------------------------------------------------------ replaced or recreated

    def _follow_new_target(self, *, renamed: bool) -> None:
        """Apply `on_target_reset`: the target contains no earlier copy.

        A target with another name may hold older copies of ours that no open batch made; they are ignored.
        """
        stream, target, copying = self._stream, self._target, self._copying
        happened = "was replaced by another" if renamed else f"was {'recreated' if target else 'deleted'}"
        if stream.on_target_reset == "stop":
            raise RunError(
                f"target stream {copying.target_stream or stream.target_stream} {happened}; the earlier copies are"
                f" not in {stream.target_stream}; set on_target_reset: continue (copy only new messages) or recopy (also"
                " copy the messages that the source still holds)"
            )
        again = self._copied_before() if stream.on_target_reset == "recopy" else []
        logger.warning(
            "%s: target stream %s %s; copying %d messages again (on_target_reset: %s)",
            stream.label,
            copying.target_stream or stream.target_stream,
            happened,
            sum(map(len, again)),
            stream.on_target_reset,
        )
        end = target.last_sequence if target and renamed else 0
        copying.target_stream = stream.target_stream
        copying.target_created_ns = target.created_ns if target else 0
        copying.target_sequence = copying.target_holds = 0
        copying.target_checked = end
        # A target that was ours before, under another configuration, holds some of the copies that are made again.
        copying.target_adopted = 1 if again and end else 0
        with self._store.transaction():
            self._log.clear()
            self._log.add_resends(again, was_copied=False)
            self._move_intents(created_ns=copying.target_created_ns, target_sequence=end, waits=bool(again))
            self._store.save_copying(copying)

    def _copied_before(self) -> list[SequenceRange]:
        """Return the copied sequences that the source may still hold; for a sampled stream, from its history."""
        source, stream = self._source, self._stream
        whole = SequenceRange(max(1, source.first_sequence), max(1, source.first_sequence, self._state.next_sequence))
        if not stream.tracked:
            return [whole]
        folder = stream_folder(self._context.home.resolve(), stream.name, stream.stream)
        mark = source_mark(self._state.created_ns, self._state.reset_starts)
        staged = [
            staging_folder(self._context.folder, stream, SequenceRange(first, after), mark)
            for first, after, source_of in self._store.snapshot_index(stream.stream).staged()
            if source_of == mark
        ]
        sequences = copied_sequences(folder, mark, self._copying.created_ns, staged)
        return merge_ranges(SequenceRange(sequence, sequence + 1) for sequence in sequences if sequence in whole)

    def _move_intents(self, *, created_ns: int, target_sequence: int, waits: bool) -> None:
        """Let the open intents search for copies after the target's current end, inside the caller's transaction."""
        for resend in (False, True):
            if intent := self._store.open_intent(self._stream.stream, resend=resend):
                moved = replace(intent, target_stream=self._stream.target_stream)
                self._store.save_intent(_moved(moved, created_ns, target_sequence, waits=waits))

    # ---------------------------------------------------------------------------------------------------- rolled back

    def _rolled_back(self, target: StreamInfo) -> bool:
        """Return whether the target lost an acknowledged copy: it ends before, or holds another message there."""
        copying = self._copying
        if target.last_sequence < copying.target_sequence:
            return True
        if target.first_sequence > copying.target_sequence:
            return False
        where, name = self._stream.target, self._stream.target_stream
        if where.api_owner:
            # A leaf node closes its link on the response with a large copy.
            with wire.Connection(where, _CLIENT) as connection:
                stored = wire.stored_headers(connection, name, copying.target_sequence)
        else:
            stored = self._context.clusters.connect(where).message(name, copying.target_sequence)
        if stored is None:
            return False
        copy = find_copy(stored.headers, self._stream.identity, copying.created_ns)
        return copy is None or copy.sequence != copying.target_holds

    def _note_rollback(self, target: StreamInfo) -> None:
        """Find the last copy that is still at its target sequence, and request resends of all later copies.

        Copies older than an hour are not in the copy log, but for one batch, and are recorded as lost. The comparison takes a
        bounded amount of memory, and one transaction commits its result, so an interruption repeats it.
        """
        held = SequenceRange(max(1, target.first_sequence), max(1, target.first_sequence, target.last_sequence + 1))
        stream, copying, before = self._stream, self._copying, self._copying.target_sequence
        copies = FoundCopies(self._context.folder)
        # The place of the last copy of any age, and its original's.
        latest = target.first_sequence - 1, 0
        for message, claim in self._read_claims(held):
            latest = message.sequence, claim.sequence
            # A restart copies messages again that an earlier one has copied.
            if not claim.is_before(copying.starts):
                copies.add(_copy(message, claim))
        copies.read_log(self._store.connection, stream.stream)
        kept = copies.last_logged()
        # Without such a copy of the last hour, use the last one.
        at, sequence = (kept.target_sequence, kept.sequence) if kept else latest
        known_at, known_from = copies.first_logged_after(at) or (before + 1, copying.target_holds + 1)
        unknown = 0 if kept or known_from <= sequence + 1 else max(0, known_at - at - 1)
        intent = self._store.open_intent(stream.stream)
        waits = intent is not None and not copies.before(intent.next) - copies.before(intent.first)
        copying.target_sequence, copying.target_holds = max(0, at), sequence
        copying.target_checked = target.last_sequence
        copying.lost_messages += unknown
        recalled = min(copying.copied_messages, unknown)
        copying.copied_messages -= recalled
        count = 0
        with self._store.transaction():
            self._store.counters(stream.stream).add({Counter.RECALLED_MESSAGES: recalled})
            if unknown:
                hole = SequenceRange(sequence + 1, known_from)
                gap = gap_row(stream.stream, hole, unknown, "lost", self._context.clock.now_ns())
                save_gaps(self._store, stream, [gap], self._context.report)
            self._log.keep_until(at)
            for lost in copies.lost(max(at + 1, held.first)):
                self._log.add_resends(merge_ranges(SequenceRange(n, n + 1) for n in lost.tolist()), was_copied=True)
                count += len(lost)
            since = target.last_sequence if waits else min(at, target.last_sequence)
            if intent is not None and intent.part and not waits:
                # Copies of a later part may precede the last one of this part.
                since = min(since, intent.target_sequence)
            self._move_intents(created_ns=target.created_ns, target_sequence=since, waits=waits)
            self._store.save_copying(copying)
        happened = f"was rolled back from {before} to {at}; sending {count} copies again, {unknown} older ones are lost"
        logger.error("%s: target stream %s %s", stream.label, stream.target_stream, happened)


def within_target(context: CopyContext, intent: Intent, target: StreamInfo) -> Intent:
    """Return an intent whose copies begin in its target, which may have lost its end since: then it has lost the copies."""
    if target.created_ns != intent.target_created_ns or target.last_sequence >= intent.target_sequence:
        return intent
    if not ends_before(context.clusters.connect(context.stream.target), target.stream, intent.target_sequence):
        return intent
    return replace(intent, target_sequence=target.last_sequence)


def _moved(intent: Intent, target_created_ns: int, target_sequence: int, *, waits: bool) -> Intent:
    moved = replace(intent, target_created_ns=target_created_ns, target_sequence=target_sequence)
    return replace(moved, waits=waits and not intent.resend)


def adopt_copies(context: CopyContext, state: StreamState, copying: CopyState, target: StreamInfo) -> FoundCopies:
    """Return the copies that no batch of this state has made, by source sequence, and commit that they are known.

    Call it once, before the first batch: later ones would be another writer's. `copying` is changed.
    """
    stream, store = context.stream, context.store
    copies = FoundCopies(context.folder)
    if stream.ephemeral:
        return copies
    intents = [store.open_intent(stream.stream, resend=resend) for resend in (False, True)]
    open_intents = [intent for intent in intents if intent and intent.target_created_ns == target.created_ns]
    checked = copying.target_adopted or max(copying.target_checked, copying.target_sequence) + 1
    if not copying.target_created_ns and copying.target_looked_ns != target.created_ns:
        # A later state created the target, or somebody recreated it, since this state's only check.
        checked = 1
    first = min([checked, *(intent.target_sequence + 1 for intent in open_intents)])
    after = target.last_sequence + 1
    # Not beyond the end, if somebody has forged the state.
    held = SequenceRange(min(max(1, first, target.first_sequence), after), after)
    others = 0
    for copy in _read_copies(context, copying, target, held):
        copies.add(copy)
        others += not any(_may_have_made(intent, copy) for intent in open_intents)
    if not others and not copying.target_adopted:
        return copies.part(0, 0)
    pending = min([state.next_sequence, *_waiting(context), *(intent.first for intent in open_intents)])
    copies.sort_by_sequence()
    newer = copies.part(copies.before(pending), len(copies))
    if len(newer):
        made = f"holds {len(newer)} copies that were made after this state; those that equal their originals are not copied again"
        logger.warning("%s: target stream %s %s", stream.label, stream.target_stream, made)
    copying.target_adopted = held.first if len(newer) else 0
    copying.target_checked = max(copying.target_checked, target.last_sequence)
    with store.transaction():
        store.save_copying(copying)
        for intent in open_intents:
            own = newer.of_range(SequenceRange(intent.first, intent.next)).location
            moved = replace(intent, target_sequence=target.last_sequence)
            store.save_intent(replace(moved, adopted_first=own.first, adopted_next=own.next))
    return newer


def _may_have_made(intent: Intent, copy: Copy) -> bool:
    """Return whether an attempt at this intent may have made a copy."""
    first, after = intent.whole
    return first <= copy.sequence < after and copy.target_sequence > intent.target_sequence


def _waiting(context: CopyContext) -> list[int]:
    """Return the first source sequences of the copy queue and of the requested resends."""
    name, store = context.stream.stream, context.store
    first, resends = store.copy_queue(name).first(), store.copy_log(name).resends(1)
    return [*([first.sequence] if first else []), *(resend.covered.first for resend in resends)]


def _copy(message: Message, claim: CopyOf) -> Copy:
    return Copy(message.sequence, claim.sequence, claim.stored_ms * 1_000_000, 0, None)


def _read_copies(context: CopyContext, copying: CopyState, target: StreamInfo, held: SequenceRange) -> Iterator[Copy]:
    stream = context.stream
    if not len(held):
        return
    label = f"{stream.label}: searching {stream.target_stream} for copies made after this state"
    with LongWork(label, len(held)) as progress, wire.Connection(stream.target, "sr-assets review") as connection:
        pattern = copies_pattern(stream, target)
        for message, copy in claimed_copies(connection, stream, held, pattern, copying.created_ns):
            # A restart copies messages again that an earlier one has copied.
            if not copy.is_before(copying.starts):
                yield _copy(message, copy)
            progress.reached(message.sequence + 1 - held.first)
