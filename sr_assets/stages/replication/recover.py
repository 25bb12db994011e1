"""`recover`: rebuilding a stream's lost position and nodes from the target's copies and the source's messages.

It is also the takeover from the Stream Replicator, whose copies have the same `Choria-SR-Source` header.

A copy that was pending is in the target, is made later (`due`), is read again after the new position, or is recorded as lost.
Transitions before the recovered position are recorded as late and stay unpublished. Later ones continue the numbers in the
advisory stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final, NamedTuple, TypeVar

import pyarrow as pa

from sr_assets.adapters import times
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.published.compaction import whole_files
from sr_assets.adapters.published.history import (
    file_mark,
    file_range,
    history_files,
    mark_restart,
    source_mark,
    stream_folder,
)
from sr_assets.adapters.state.database import BrokenStateError, keep_newest_asides
from sr_assets.adapters.state.orders import request_refill, withdraw_order
from sr_assets.adapters.state.records import CopyState, StreamState
from sr_assets.adapters.state.stream_tables import Gap, gap_row
from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.errors import RunError, TransientError
from sr_assets.domain.history_layout import HistoryFile
from sr_assets.domain.positions import SequenceRange, format_rfc3339_ns, merge_ranges, missing
from sr_assets.domain.provenance import forged_text
from sr_assets.domain.received import Advisory
from sr_assets.domain.tracking.rows import folded_table, node_table, state_of, transition_row
from sr_assets.settings import Settings, StreamSettings
from sr_assets.stages.replication.batch import settle_fence
from sr_assets.stages.replication.context import CopyContext, writers_folder
from sr_assets.stages.replication.lost import stage_open_batch, stored_advisories
from sr_assets.stages.replication.rebuilding import (
    Announced,
    Rebuilt,
    continue_announced,
    keep_known_nodes,
    node_rows,
    rebuild_nodes,
    refine_times,
    restore_blind_time,
    sampled_since,
)
from sr_assets.stages.replication.target_copies import Copies, check_source, find_copies, read_stream
from sr_assets.stages.report import StreamReport
from sr_assets.stages.site import Site
from sr_assets.stages.source.holes import find_holes, gap_rows
from sr_assets.stages.source.position import another_source, epoch_at, first_sequence, sequence_at
from sr_assets.stages.source.source_reading import first_available
from sr_assets.stages.tracking.batch_rows import add_transitions
from sr_assets.stages.tracking.node_snapshots import SnapshotStage

T = TypeVar("T")
_PORTION: Final = 50_000


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
    _classify_queued(site, stream, source, state, copies, pending)
    store, name = site.state, stream.stream
    intent = store.open_intent(name)
    again = [resend.covered for resend in store.copy_log(name).resends()]
    if stream.tracked:
        # Resends name single sequences; a batch's own sequences are in the queue.
        sequences = [sequence for covered in again for sequence in range(covered.first, covered.next)]
        known = {copy.sequence for copy in copies.here.of_sequences(sequences)} | pending.due.keys()
        pending.due |= {n: None for n in sequences if n <= (copies.last or 0) and n not in known}
        return pending
    if intent is not None and not intent.folded and intent.created_ns == source.created_ns:
        again.append(SequenceRange(intent.first, intent.next))
    cutoff_ns = intent.cutoff_ns if intent is not None else None
    _read_again(site, stream, source, copies, again, cutoff_ns, pending)
    return pending


def _classify_queued(
    site: Site, stream: StreamSettings, source: StreamInfo, state: StreamState, copies: Copies, pending: PendingCopies
) -> None:
    """Keep queued copies of the present source, and record the other unmade ones as lost."""
    queued, end = site.state.copy_queue(stream.stream).all_copies(), (copies.last or 0) + 1
    if queued and not len(copies):
        # Only what was read tells whether the sequences still identify the same messages.
        end = 0 if _has_read_another(site, stream, source) else state.next_sequence
    made = copies.made([sequence for _, sequence, _ in queued], state.created_ns)
    lost: list[int] = []
    for created_ns, sequence, node in queued:
        if (created_ns, sequence) in made:
            continue
        if created_ns == state.created_ns and sequence < end:
            pending.due[sequence] = node
        elif created_ns != state.created_ns or sequence < state.next_sequence or copies.source_is_another:
            lost.append(sequence)
    if lost:
        hole = SequenceRange(min(lost), max(lost) + 1)
        pending.gaps.append(gap_row(stream.stream, hole, len(lost), "lost", site.clock.now_ns()))
        pending.lost = len(lost)


def _has_read_another(site: Site, stream: StreamSettings, source: StreamInfo) -> bool:
    """Return whether a readable state has read another source than the present one."""
    known = site.state.load_stream(stream.stream)
    if known is None or not known.has_position:
        return False
    return another_source(site.clusters.connect(stream.source), stream, source, known) is not None


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
        made = {copy.sequence for copy in copies.here.of_range(covered)}
        held: set[int] = set()
        if available < covered.next:
            for message in read_stream(stream.source, source, stream.filter_subject, since=available, until=end - 1):
                if message.sequence >= covered.next:
                    break
                held.add(message.sequence)
                if message.sequence in made:
                    continue
                if cutoff_ns is not None and message.stored_ns < cutoff_ns:
                    pending.too_old += 1
                else:
                    pending.due[message.sequence] = None
        known = sorted(held | made)
        holes = missing(SequenceRange(available, covered.next), known)
        lacking = [hole for hole in missing(SequenceRange(covered.first, available), known) if len(hole)]
        now_ns = site.clock.now_ns()
        classified = find_holes(stream, site.clusters.connect(stream.source), source, holes)
        pending.gaps += gap_rows(stream, SequenceRange(available, covered.next), available, classified, now_ns)
        pending.gaps += [gap_row(stream.stream, hole, len(hole), "overtaken", now_ns) for hole in lacking]
        pending.absent += sum(map(len, (*holes, *lacking)))


def portions(rows: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield rows in lists of `size` rows."""
    left = iter(rows)
    return iter(lambda: list(islice(left, size)), [])


def recover_stream(settings: Settings, stream: StreamSettings, *, force: bool = False) -> str:
    """Rebuild a stream's state, and return the results and the unknown facts as lines.

    `force` rebuilds even if the state is readable, or the source was recreated or rolled back; the site's other streams
    keep their state.

    Raises RunError without `force` if a state that has copied is readable or the source's message differs from the copied
    one, and in any case if there are neither copies nor advisories of the stream, or a server does not respond.
    """
    lines = _set_broken_state_aside(settings, stream)
    with Site(settings, stream.name, owner="recover", run_id="recover") as site:
        known = site.state.load_stream(stream.stream)
        # A state that has made no copy may be the new start of a lost one.
        copied = site.state.load_copying(stream.stream).target_stream is not None
        if known is not None and known.has_position and copied and not force:
            raise RunError(
                f"{stream.label} already has a readable state in {site.folder}; to rebuild it nevertheless, use --force"
            )
        source = site.clusters.connect(stream.source).stream_info(stream.stream)
        site.clock.set(source.ts_ns)
        settle_fence(writers_folder(site.folder, stream), site.clusters.connect(stream.target))
        copies, rebuilt = find_copies(site, stream, source), Rebuilt()
        unknown = rebuilt.unknown
        mark_ns = check_source(site, stream, source, copies, unknown, force=force) if len(copies) else None
        position = _position_after_copies(site, stream, source, copies) if len(copies) else None
        reread_ns = _reread_ns(site, stream, source, copies, position) if position else None
        announced = _read_announced(site, stream, reread_ns, unknown)
        if position is None and announced.last:
            position = _position_after_events(site, stream, source, announced.last)
            announced.reread_ns = _reread_ns(site, stream, source, copies, position)
        if position is None:
            raise RunError(
                f"target stream {stream.target_stream} holds no copies of {stream.label}: nothing to recover from; a run"
                f" {'continues from the present state' if known else 'begins at its first message'}"
            )
        if announced.after:
            messages = read_stream(stream.source, source, stream.filter_subject, since=position.sequence)
            if (undone_ns := announced.find_messages(stream, messages)) is not None:
                last_ns = max(position.last_stored_ns, undone_ns)
                position = position._replace(last_stored_ns=last_ns, hole_open=True)
        if stream.policy is not None:
            _rebuild_nodes(site, stream, source, copies, announced, position, rebuilt)
        state, copying = _recovered_state(site, stream, source, copies, position, known)
        state.forgotten_transition = max(state.forgotten_transition, rebuilt.highest)
        end = copies.last or source.last_sequence
        if mark_ns is None and 0 < end < source.first_sequence:
            # A message that the source has there later is one of another source.
            mark_ns = position.last_stored_ns
        state.mark_sequence, state.mark_ns = (None, None) if mark_ns is None else (end, mark_ns)
        pending = _commit(site, stream, source, state, copying, copies, rebuilt)
        files = _index_history(site, stream, state)
        request_refill(site.folder, stream)
        withdraw_order(site.folder, "yield")
        site.publish()
    return "\n".join([*lines, *_summary(stream, state, copies, rebuilt, pending, files)])


def _summary(
    stream: StreamSettings, state: StreamState, copies: Copies, rebuilt: Rebuilt, pending: PendingCopies, files: int
) -> list[str]:
    """Return the results and the unknown facts as lines; `files` is the number of indexed history files."""
    nodes, late = len(rebuilt.nodes), len(rebuilt.transitions)
    last = "none of what the source holds now" if copies.last is None else f"the last one of {copies.last}"
    position = f"continues at {state.next_sequence}; {len(copies)} copies found in {stream.target_stream}, {last}"
    return [
        f"{stream.label}: {position}",
        f"{nodes} nodes rebuilt, {late} transitions recorded as late and not published, {files} snapshot files kept",
        *(
            f"{count} {fate}"
            for count, fate in (
                (len(pending.due), "copies that were queued or under way are made by the next run"),
                (pending.lost, "queued copies are lost with their source, as `gaps` shows"),
            )
            if count
        ),
        *([forged_text(stream.target_stream, copies.forged)] if copies.forged else []),
        *(f"not known: {line}" for line in rebuilt.unknown),
        "not known: counters before this recovery; they begin with the copies that were found",
    ]


def _set_broken_state_aside(settings: Settings, stream: StreamSettings) -> list[str]:
    """Rename an unreadable state; it is never overwritten."""
    folder = settings.home / "sites" / stream.name
    file = folder / "state.duckdb"
    if not file.exists():
        return []
    try:
        with Site(settings, stream.name, owner="recover", run_id="recover", wait_seconds=10.0):
            return []
    except BrokenStateError:
        pass
    aside = folder / f"state.duckdb.broken-{times.utc_now():%Y%m%dT%H%M%SZ}"
    file.rename(aside)
    log = file.with_name(f"{file.name}.wal")
    if log.exists():
        # It belongs to the broken state; a new state would replay it.
        log.rename(aside.with_name(f"{aside.name}.wal"))
    keep_newest_asides(file, "broken")
    return [f"the unreadable state is kept as {aside}"]


def _read_announced(site: Site, stream: StreamSettings, reread_ns: int | None, unknown: list[str]) -> Announced:
    """Read a stream's stored advisories.

    Raises RunError if they cannot be read for the moment: a state without them announces their silences again.
    """
    announced, cluster = Announced(reread_ns), stream.advisory_cluster
    if cluster is None:
        return announced
    try:
        for advisory in stored_advisories(stream, site.clusters.connect(cluster)):
            announced.note(advisory)
    except TransientError as error:
        raise RunError(f"{stream.label}: its stored advisories cannot be read: {error}; run recover again") from None
    except RunError as error:
        unknown.append(f"which transitions were announced: {error}")
        return announced
    if not announced.last:
        unknown.append(f"which transitions were announced: no stream on {cluster.label} has any")
    return announced


class _Position(NamedTuple):
    """The first sequence to read, the stored time of the last message before it, and the new watermark (unix ns).

    `hole_open` means that the source may lack messages of the time after that.
    """

    sequence: int
    last_stored_ns: int
    watermark_ns: int
    hole_open: bool = False


def _position_after_events(
    site: Site, stream: StreamSettings, source: StreamInfo, announced: Mapping[str, Advisory]
) -> _Position:
    announced_ns = max(advisory.event_ns for advisory in announced.values())
    sequence = sequence_at(site.clusters.connect(stream.source), source, announced_ns + 1)
    return _Position(sequence, announced_ns, announced_ns, hole_open=sequence <= max(1, source.first_sequence))


def _position_after_copies(site: Site, stream: StreamSettings, source: StreamInfo, copies: Copies) -> _Position:
    """Return the position after the last copy, or the entry's start if the present source has none."""
    # A publisher to the target chooses the time in a copy's header.
    watermark_ns = min(copies.latest_ns, site.clock.now_ns())
    last = copies.last
    if last is not None and not copies.source_is_another:
        return _Position(last + 1, copies.here[-1].stored_ns, watermark_ns)
    cluster = site.clusters.connect(stream.source)
    sequence = first_sequence(cluster, stream.start, source) if last is None else last + 1
    return _Position(sequence, watermark_ns, watermark_ns, hole_open=True)


def _reread_ns(
    site: Site, stream: StreamSettings, source: StreamInfo, copies: Copies, position: _Position
) -> int | None:
    """Return the time (unix ns) from which on the source holds the messages of all events, or None if it lacks some."""
    if stream.policy is None:
        return None
    # Another source lacks the message of an event; one with a limit per subject may, whatever its first one.
    is_another = copies.source_is_another or _has_read_another(site, stream, source)
    if source.first_sequence > position.sequence or _has_holes(source) or is_another:
        return None
    reread = site.clusters.connect(stream.source).next_message(source.stream, position.sequence)
    return reread.stored_ns if reread else None


def _has_holes(source: StreamInfo) -> bool:
    """Return whether the source lacks messages between others."""
    return source.messages != source.last_sequence + 1 - source.first_sequence


def _rebuild_nodes(
    site: Site,
    stream: StreamSettings,
    source: StreamInfo,
    copies: Copies,
    announced: Announced,
    position: _Position,
    rebuilt: Rebuilt,
) -> None:
    """Fold the copies and the source's messages up to the position; a readable state adds older knowledge."""
    nodes = site.state.nodes(stream.stream)
    rebuilt.blind = BlindSpans(tuple(nodes.blind_spans()))
    until = (copies.last or 0) if len(copies) else position.sequence - 1
    messages = read_stream(stream.source, source, stream.filter_subject, until=until)
    rebuild_nodes(stream, copies, source.first_sequence, messages, rebuilt)
    queued = site.state.copy_queue(stream.stream).all_copies()
    here = source.created_ns
    not_made = {node for created_ns, sequence, node in queued if created_ns != here or sequence >= position.sequence}
    rows = nodes.all_states()
    states = {node: state_of(values) for node, _, *values in rows}
    rebuilt.classes = {node: node_class for node, node_class, *_ in rows} | rebuilt.classes
    refine_times(stream, rebuilt, announced)
    if announced.reread_ns is not None:
        # The next run finds a node again whose messages all follow the position; its state would date them too late.
        later = {
            node: state
            for node, state in states.items()
            if node not in rebuilt.nodes and state.first_seen_ns >= announced.reread_ns
        }
        rebuilt.highest = max((state.transition for state in later.values()), default=0)
        states = {node: state for node, state in states.items() if node not in later}
    keep_known_nodes(rebuilt, states, not_made)
    held_ns = None if position.hole_open or _has_holes(source) else source.first_stored_ns
    # A copy's header names milliseconds.
    copied_ns = position.watermark_ns + 1_000_000
    until_ns = copied_ns if held_ns is None else min(held_ns, copied_ns)
    since_ns = sampled_since(stream, rebuilt, announced, until_ns)
    if since_ns < until_ns:
        rebuilt.blind = rebuilt.blind.add([(since_ns, until_ns)])
        sampled = f"{format_rfc3339_ns(since_ns)} to {format_rfc3339_ns(until_ns)}"
        rebuilt.unknown.append(f"messages of the time from {sampled} that were not copied; silence excludes this time")
    restore_blind_time(stream, rebuilt, announced)
    continue_announced(stream, rebuilt, announced, states)


def _recovered_state(
    site: Site,
    stream: StreamSettings,
    source: StreamInfo,
    copies: Copies,
    position: _Position,
    known: StreamState | None,
) -> tuple[StreamState, CopyState]:
    """Return the state at the new position; after a change of source, later copies have another restart's ids."""
    starts, reset_starts = (known.starts, known.reset_starts) if known else (0, 0)
    if known is None or not known.has_position:
        # Unlike the state, the history's files tell the number of earlier sources.
        starts = reset_starts = _last_restart(site, stream, source, copies)
        if len(copies.undone):
            # The history's files may be older than the last rollback.
            reset_starts = max(reset_starts, copies.restart)
    # No id of a lost restart may be used again. It may be one too high: a copy that was sent again has the next one.
    starts = max(starts, copies.restart)
    if copies.source_is_another:
        starts = reset_starts = starts + 1
    state = StreamState(
        stream.stream,
        source.created_ns,
        position.sequence,
        epoch_ns=max(epoch_at(source), known.epoch_ns + 1 if known else 0),
        watermark_ns=position.watermark_ns,
        planned_ns=source.ts_ns,
        last_stored_ns=position.last_stored_ns,
        hole_open=position.hole_open,
        source_last_sequence=source.last_sequence,
        lag_messages=max(0, source.last_sequence + 1 - max(position.sequence, source.first_sequence)),
        started=known.started if known else None,
        starts=starts,
        reset_starts=reset_starts,
        forgotten_transition=known.forgotten_transition if known else 0,
        seen_messages=len(copies.here),
        as_of_ns=site.clock.now_ns(),
    )
    return state, _recovered_copying(site, stream, CopyState(stream.stream, source.created_ns, starts), copies)


def _recovered_copying(site: Site, stream: StreamSettings, copying: CopyState, copies: Copies) -> CopyState:
    """Return the state of the copies that the target holds; without any, the first batch checks the target."""
    if not len(copies):
        return copying
    here, target = copies.here, site.clusters.connect(stream.target).stream_info(stream.target_stream)
    copying = replace(
        copying,
        target_stream=stream.target_stream,
        target_created_ns=target.created_ns,
        target_checked=target.last_sequence,
        copied_messages=len(here),
        copied_bytes=here.total_bytes,
    )
    if not copies.source_is_another:
        copying.target_sequence, copying.target_holds = here.latest.target_sequence, here.latest.sequence
    return copying


def _last_restart(site: Site, stream: StreamSettings, source: StreamInfo, copies: Copies) -> int:
    """Return the last restart number in the history's files, plus one if it belongs to an earlier source."""
    folder = stream_folder(site.settings.home.resolve(), stream.name, stream.stream)
    marks = {file_mark(file) for file in history_files(folder)}
    last = max(map(mark_restart, marks), default=0)
    of_earlier = bool(len(copies.earlier)) and source_mark(source.created_ns, last) not in marks
    return last + (of_earlier and not copies.source_is_another)


def _commit(
    site: Site,
    stream: StreamSettings,
    source: StreamInfo,
    state: StreamState,
    copying: CopyState,
    copies: Copies,
    rebuilt: Rebuilt,
) -> PendingCopies:
    """Replace the stream's state by the rebuilt one, except its history and outbox.

    Returns the pending copies.
    """
    store, name = site.state, stream.stream
    if stream.tracked:
        _keep_history(site, stream, source)
    pending = classify_pending(site, stream, source, state, copies)
    state.seen_messages += len(pending.due) + pending.lost + pending.too_old
    state.too_old_messages, state.gap_messages = pending.too_old, pending.absent
    copying.lost_messages = pending.lost
    with store.transaction():
        store.forget_stream(name)
        store.save_stream(state)
        store.save_copying(copying)
        store.copy_queue(name).append(pending.rows, state.created_ns, state.starts)
        store.gaps(name).add(pending.gaps, apart=stream.batch_messages)
        if not stream.tracked or not rebuilt.nodes:
            return pending
        nodes = store.nodes(name)
        nodes.save_blind_spans(rebuilt.blind.spans)
        for rows in portions(node_rows(stream, rebuilt), _PORTION):
            nodes.merge(node_table(rows))
        for events in portions(rebuilt.transitions, _PORTION):
            folded = folded_table([transition_row(*event) for event in events])
            add_transitions(store, stream, state, folded, StreamReport(stream), history=True)
    return pending


def _keep_history(site: Site, stream: StreamSettings, source: StreamInfo) -> None:
    """Move the rows of committed batches, and of an open batch's copies, into the history."""
    report, home = StreamReport(stream), site.settings.home
    files, clock, folder = site.files, site.clock, site.folder
    context = CopyContext(stream, site.state, site.clusters, site.spark, files, clock, home, folder, report)
    stage_open_batch(context, source)
    SnapshotStage(stream, site.state, site, report).index_staged()


def _index_history(site: Site, stream: StreamSettings, state: StreamState) -> int:
    """Index the existing Parquet history for the newest message per node, an earlier source's files first."""
    folder = stream_folder(site.settings.home.resolve(), stream.name, stream.stream)
    here = source_mark(state.created_ns, state.reset_starts)
    by_restart: dict[tuple[int, str], list[HistoryFile]] = {}
    for file in whole_files(folder):
        if file.mark != here or file_range(file.path)[1] <= state.next_sequence:
            by_restart.setdefault((mark_restart(file.mark), file.mark), []).append(file)
    with site.state.transaction():
        for _, files in sorted(by_restart.items()):
            site.state.snapshot_index(stream.stream).add(0, 0, files)
    return sum(map(len, by_restart.values()))
