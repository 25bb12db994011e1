"""Lost parts of a stream: a state that its copies or advisories prove, or a source that no longer exists.

To start over without the lost state would store the copies twice and announce every node as new. Queue and intent outlive
their source only if `on_source_reset` lets the stream continue.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from sr_assets.adapters import wire
from sr_assets.adapters.copying.receipt import Receipt
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.progress_lines import LongWork
from sr_assets.adapters.published.history import source_mark
from sr_assets.adapters.state.records import CopyState, Intent, StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.adapters.state.stream_tables import gap_row
from sr_assets.domain.errors import LostStateError, RunError, TransientError
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.provenance import Identity, doubled_text, find_copy, foreign_copy, forged_text
from sr_assets.domain.received import Advisory, read_message
from sr_assets.domain.subjects import advisory_pattern, matcher
from sr_assets.settings import StreamSettings
from sr_assets.stages.connections import Clusters
from sr_assets.stages.replication.batch import Writers
from sr_assets.stages.replication.target_copies import first_genuine, read_stream
from sr_assets.stages.replication.target_review import within_target
from sr_assets.stages.replication.target_setup import copies_pattern
from sr_assets.stages.source.source_reading import save_gaps

if TYPE_CHECKING:
    from sr_assets.stages.replication.context import CopyContext

logger = logging.getLogger(__name__)
_ALL = 1 << 62


def refuse_lost_state(stream: StreamSettings, store: SiteState, clusters: Clusters) -> None:
    """Raise LostStateError if a stream without a position has copies in its target, or stored advisories.

    Call it before the position is stored, which makes this home one with a state. A stream may begin while its target is
    unreachable, but only without an election, in which another member may have the state, and if nothing can be announced a
    second time: it has no advisories, or their stream holds none of it. Otherwise TransientError is raised.
    """
    state = store.load_stream(stream.stream)
    if state is not None and state.has_position:
        return
    source = clusters.connect(stream.source).stream_info(stream.stream)
    unannounced = stream.advisory is None or _refuse_announced(stream, clusters)
    try:
        target = clusters.connect(stream.target).find_stream(stream.target_stream)
        refuse_lost_copies(stream, store, store.load_copying(stream.stream), source, target)
    except TransientError as error:
        if not unannounced or clusters.leadership.elects:
            raise
        logger.warning("%s: reading begins, although the target's copies are unknown: %s", stream.label, error)


def _refuse_announced(stream: StreamSettings, clusters: Clusters) -> bool:
    """Raise LostStateError if a stream has stored advisories; return whether it is proven that none were announced."""
    assert stream.advisory is not None
    assert stream.advisory_cluster is not None
    if stream.advisory.reliable is False:
        return False
    cluster = clusters.connect(stream.advisory_cluster)
    try:
        keepers = cluster.stream_names(advisory_pattern(stream.advisory.subject))
        advisory = next(stored_advisories(stream, cluster), None)
    except RunError as error:
        if isinstance(error, TransientError) and not isinstance(error, wire.DeniedError):
            raise
        logger.warning("%s: cannot read the stored advisories, which would show a lost state: %s", stream.label, error)
        return False
    if advisory is not None:
        raise LostStateError(
            f"there is no state for {stream.label}, but a stream on {stream.advisory_cluster.label} already holds"
            f" advisories of it (node {advisory.node}, transition {advisory.transition}); run `sr-assets recover --stream"
            f" {stream.label}`"
        )
    return bool(keepers)


def refuse_lost_copies(
    stream: StreamSettings, store: SiteState, copying: CopyState, source: StreamInfo, target: StreamInfo | None
) -> None:
    """Raise LostStateError if the target holds copies of a stream whose state has none.

    The whole target is scanned once in a stream's life: on a shared target, our copies may be older than many others. An
    interrupted scan resumes; the scan of another target does not count. The state then has the name of the target, which
    proves that copies found later belong to a later state.
    """
    if not stream.ephemeral and target is not None:
        _scan(stream, store, copying, source, target)
    copying.target_stream, copying.target_checked = stream.target_stream, target.last_sequence if target else 0
    with store.transaction():
        store.save_copying(copying)


def _scan(stream: StreamSettings, store: SiteState, copying: CopyState, source: StreamInfo, target: StreamInfo) -> None:
    looked = copying.target_looked if copying.target_looked_ns == target.created_ns else 0
    after = target.last_sequence + 1
    held = SequenceRange(min(max(1, target.first_sequence, looked + 1), after), after)
    if not len(held):
        return
    identity = stream.identity
    foreign: Identity | None = None
    # Copies of an entry with another filter have other subjects.
    possible = matcher([copies_pattern(stream, target) or ">"])
    looking = f"{stream.label}: scanning target stream {stream.target_stream}"
    forged = 0
    with LongWork(looking, len(held)) as progress, wire.Connection(stream.target, "sr-assets review") as connection:
        for messages in wire.read_headers(connection, stream.target_stream, held):
            claims = [(message, copy) for message in messages if (copy := find_copy(message.headers, identity))]
            of_others = ((at, copy) for at, copy in claims if copy.created_ns not in (None, source.created_ns))
            genuine = next(((message.sequence, copy.sequence) for message, copy in of_others), None)
            if claims and genuine is None:
                # A run cannot copy again what the source never held.
                genuine = first_genuine(stream, claims, lost_until=source.last_sequence)
            if genuine is not None:
                at, sequence = genuine
                raise LostStateError(
                    f"there is no state for {stream.label}, but target stream {stream.target_stream} already holds copies"
                    f" of it ({sequence} at {at}); run `sr-assets recover --stream {stream.label}`"
                )
            forged += len(claims)
            for message in messages:
                if foreign is None and possible(message.subject):
                    foreign = foreign_copy(message.headers, identity, source.created_ns)
            if progress.reached(messages[-1].sequence + 1 - held.first):
                _note_scan(store, copying, target, messages[-1].sequence)
    if forged:
        logger.error("%s: %s", stream.label, forged_text(stream.target_stream, forged))
    _note_scan(store, copying, target, target.last_sequence)
    if foreign is not None:
        logger.warning("%s: %s", stream.label, doubled_text(stream.target_stream, identity, foreign))


def _note_scan(store: SiteState, copying: CopyState, target: StreamInfo, sequence: int) -> None:
    """Save the progress of a target scan."""
    copying.target_looked_ns, copying.target_looked = target.created_ns, sequence
    with store.transaction():
        store.save_copying(copying)


def stored_advisories(stream: StreamSettings, cluster: Cluster) -> Iterator[Advisory]:
    """Yield a stream's advisories in the streams that keep their subject, each stream's in order."""
    assert stream.advisory is not None
    pattern = advisory_pattern(stream.advisory.subject)
    for keeper in cluster.stream_names(pattern):
        for message in read_stream(cluster.settings, cluster.stream_info(keeper), pattern):
            advisory = read_message(message.payload, message.stored_ns)
            if isinstance(advisory, Advisory) and advisory[:3] == (stream.replicator, stream.name, stream.stream):
                yield advisory


def settle_lost_source(context: CopyContext, source: StreamInfo, copying: CopyState) -> bool:
    """Remove the queued copies of an earlier source, and return whether there were any.

    Copies that an open batch has made count as copied and join the history; the others are a gap with reason `lost`.
    """
    stream, store = context.stream, context.store
    queue = store.copy_queue(stream.stream)
    first = queue.first()
    state = store.load_stream(stream.stream)
    if first is None or state is None or first.starts >= state.reset_starts:
        return False
    intent, batch_end, receipt = store.open_intent(stream.stream), 0, Receipt()
    if intent is not None:
        # The batch covers the front of the queue.
        batch_end = intent.next
        receipt = _settle(context, source, state, intent, queue.in_range(_covered(intent), first.starts))
    never_started = queue.in_range(SequenceRange(batch_end, _ALL), first.starts)["sequence"]
    holes = [SequenceRange(*bounds) for bounds in receipt.missing]
    lost = sum(map(len, holes)) + len(never_started)
    if len(never_started):
        holes.append(SequenceRange(never_started[0].as_py(), never_started[-1].as_py() + 1))
    copying.copied_messages += receipt.copied
    copying.copied_bytes += receipt.copied_bytes
    copying.lost_messages += lost
    logger.warning("%s: lost %d queued copies with their source", stream.label, lost)
    with store.transaction():
        if holes:
            hole = SequenceRange(min(part.first for part in holes), max(part.next for part in holes))
            gap = gap_row(stream.stream, hole, lost, "lost", context.clock.now_ns())
            save_gaps(store, stream, [gap], context.report)
        queue.remove(SequenceRange(0, _ALL), first.starts)
        if intent is not None and stream.tracked:
            store.snapshot_index(stream.stream).stage(intent.first, intent.next, _mark(intent))
        store.clear_intent(stream.stream)
        store.save_copying(copying)
    context.report.gap_messages += lost
    return True


def settle_abandoned_batch(context: CopyContext, source: StreamInfo, state: StreamState, copying: CopyState) -> None:
    """Count the copies that an open batch of a plain range has made of an earlier source.

    The remaining messages were never read. The caller commits `state` and `copying`, and clears the intent.
    """
    intent = context.store.open_intent(context.stream.stream)
    if intent is not None and not intent.folded:
        receipt = _settle(context, source, state, intent, _covered(intent))
        state.seen_messages += receipt.copied
        copying.copied_messages += receipt.copied
        copying.copied_bytes += receipt.copied_bytes


def stage_open_batch(context: CopyContext, source: StreamInfo) -> None:
    """Add the copies of an open batch to the history, because no run repeats that batch after a recovery."""
    stream, store = context.stream, context.store
    state, intent = store.load_stream(stream.stream), store.open_intent(stream.stream)
    if state is None or intent is None or not intent.folded or not stream.tracked:
        return
    _settle(context, source, state, intent, store.copy_queue(stream.stream).in_range(_covered(intent), intent.starts))
    with store.transaction():
        store.snapshot_index(stream.stream).stage(intent.first, intent.next, _mark(intent))


def _settle(
    context: CopyContext, source: StreamInfo, state: StreamState, intent: Intent, rows: pa.Table | SequenceRange
) -> Receipt:
    """Return the copies that an open batch has made of `rows`; the others are missing."""
    target_stream = intent.target_stream or context.stream.target_stream
    target = context.clusters.connect(context.stream.target).find_stream(target_stream)
    if target is None or target.created_ns != intent.target_created_ns:
        sequences = range(rows.first, rows.next) if isinstance(rows, SequenceRange) else rows["sequence"].to_pylist()
        return Receipt(missing=[(sequence, sequence + 1) for sequence in sequences])
    writers = Writers(context, source, state, within_target(context, intent, target), target, _mark(intent))
    writers.take_over()
    return writers.settle(rows)


def _mark(intent: Intent) -> str:
    """Return the `source_mark` of the intent's source."""
    return source_mark(intent.created_ns, intent.starts)


def _covered(intent: Intent) -> SequenceRange:
    return SequenceRange(intent.first, intent.next)
