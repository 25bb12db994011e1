"""Accounting for the copies that were pending when a stream is recovered.

Each one is in the target, is made later (`due`), is read again after the new position, or is recorded as lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.state.gaps import Gap, gap_row
from sr_assets.adapters.state.records import StreamState
from sr_assets.domain.positions import SequenceRange, merge_ranges, missing
from sr_assets.settings import StreamSettings
from sr_assets.stages.replication.copies import Copies, read_stream
from sr_assets.stages.source.holes import find_holes, gap_rows
from sr_assets.stages.source.reading import first_available

if TYPE_CHECKING:
    from sr_assets.stages.site import Site


@dataclass(slots=True)
class PendingCopies:
    """The fate of pending copies: due ones by sequence with their node, gaps, and the numbers of lost, absent and too
    old ones.
    """

    due: dict[int, str | None] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    lost: int = 0
    absent: int = 0
    too_old: int = 0

    @property
    def rows(self) -> pa.Table:
        """The due copies, in the columns of the copy queue."""
        sequences = sorted(self.due)
        columns = ("sequence", "node", "payload_bytes")
        kinds = (pa.int64(), pa.string(), pa.int64())
        values = (sequences, [self.due[sequence] for sequence in sequences], [0] * len(sequences))
        return pa.table({name: pa.array(each, kind) for name, each, kind in zip(columns, values, kinds, strict=True)})


def classify_pending(
    site: Site, stream: StreamSettings, source: StreamInfo, state: StreamState, copies: Copies
) -> PendingCopies:
    """Classify the queue, an open batch, and the target's lost copies; `state` is the recovered state.

    Messages after the last copy of the present source are read again. This function writes nothing.
    """
    pending = PendingCopies()
    _classify_queued(site, stream, state, copies, pending)
    store, name = site.state, stream.stream
    intent = store.open_intent(name)
    again = [resend.covered for resend in store.copy_log(name).resends()]
    if stream.tracked:
        # Resends name single sequences; a batch's own sequences are in the queue.
        sequences = (sequence for covered in again for sequence in range(covered.first, covered.next))
        pending.due |= {
            n: None for n in sequences if copies.is_covered(n) and n not in copies.here and n not in pending.due
        }
        return pending
    if intent is not None and not intent.folded and intent.created_ns == source.created_ns:
        again.append(SequenceRange(intent.first, intent.next))
    cutoff_ns = intent.cutoff_ns if intent is not None else None
    _read_again(site, stream, source, copies, again, cutoff_ns, pending)
    return pending


def _classify_queued(
    site: Site, stream: StreamSettings, state: StreamState, copies: Copies, pending: PendingCopies
) -> None:
    """Keep queued copies of the present source, and record the other unmade ones as lost."""
    queued = site.state.copy_queue(stream.stream).all_copies()
    made = copies.made([sequence for _, sequence, _ in queued], state.created_ns)
    lost: list[int] = []
    for created_ns, sequence, node in queued:
        if (created_ns, sequence) in made:
            continue
        if created_ns == state.created_ns and copies.is_covered(sequence):
            pending.due[sequence] = node
        elif created_ns != state.created_ns or sequence < state.next_sequence or copies.source_is_another:
            lost.append(sequence)
    if lost:
        hole = SequenceRange(min(lost), max(lost) + 1)
        pending.gaps.append(gap_row(stream.stream, hole, len(lost), "lost", site.clock.now_ns()))
        pending.lost = len(lost)


def _read_again(
    site: Site,
    stream: StreamSettings,
    source: StreamInfo,
    copies: Copies,
    ranges: Iterable[SequenceRange],
    cutoff_ns: int | None,
    pending: PendingCopies,
) -> None:
    """Find the messages in ranges of a plain stream that the source holds and the target lacks."""
    end = (copies.last or 0) + 1
    for covered in merge_ranges(SequenceRange(min(part.first, end), min(part.next, end)) for part in ranges):
        available = first_available(source, covered)
        held: set[int] = set()
        if available < covered.next:
            for message in read_stream(stream.source, source, stream.filter_subject, since=available, until=end - 1):
                if message.sequence >= covered.next:
                    break
                held.add(message.sequence)
                if message.sequence in copies.here:
                    continue
                if cutoff_ns is not None and message.stored_ns < cutoff_ns:
                    pending.too_old += 1
                else:
                    pending.due[message.sequence] = None
        first, after = map(copies.here.before, (covered.first, covered.next))
        known = sorted({*held, *(copy.sequence for copy in copies.here.part(first, after))})
        holes = missing(SequenceRange(available, covered.next), known)
        lacking = [hole for hole in missing(SequenceRange(covered.first, available), known) if len(hole)]
        now_ns = site.clock.now_ns()
        classified = find_holes(stream, site.clusters.connect(stream.source), source, holes)
        pending.gaps += gap_rows(stream, SequenceRange(available, covered.next), available, classified, now_ns)
        pending.gaps += [gap_row(stream.stream, hole, len(hole), "overtaken", now_ns) for hole in lacking]
        pending.absent += sum(map(len, (*holes, *lacking)))
