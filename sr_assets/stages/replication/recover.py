"""`recover`: rebuilding a stream's lost position and nodes from the target's copies and the source's messages.

It is also the takeover from the Stream Replicator, whose copies have the same `Choria-SR-Source` header.

Transitions before the recovered position are recorded as late and stay unpublished. Later ones continue the numbers in
the advisory stream.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, NamedTuple

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
from sr_assets.adapters.state.records import CopyState, StreamState
from sr_assets.adapters.state.refill_request import request_refill
from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.errors import RunError
from sr_assets.domain.history_layout import HistoryFile
from sr_assets.domain.provenance import forged_text
from sr_assets.domain.received import Advisory
from sr_assets.domain.tracking.rows import folded_table, node_table, state_of, transition_row
from sr_assets.settings import Settings, StreamSettings
from sr_assets.stages.replication.context import CopyContext, writers_folder
from sr_assets.stages.replication.copies import Copies, compare_with_original, find_copies, read_stream
from sr_assets.stages.replication.fencing import settle_fence
from sr_assets.stages.replication.lost_source import stage_open_batch
from sr_assets.stages.replication.lost_state import last_announced
from sr_assets.stages.replication.pending_copies import PendingCopies, classify_pending
from sr_assets.stages.replication.rebuilding import (
    Rebuilt,
    continue_announced,
    keep_known_nodes,
    node_rows,
    portions,
    rebuild_nodes,
)
from sr_assets.stages.report import StreamReport
from sr_assets.stages.site import Site
from sr_assets.stages.source.position import epoch_at, first_sequence, sequence_at
from sr_assets.stages.tracking.batch_rows import add_transitions
from sr_assets.stages.tracking.node_snapshots import SnapshotStage

_PORTION: Final = 50_000


def recover_stream(settings: Settings, stream: StreamSettings, *, force: bool = False) -> str:
    """Rebuild a stream's state, and return the results and the unknown facts as lines.

    `force` rebuilds even if the state is readable, or the source was recreated or rolled back; the site's other streams
    keep their state.

    Raises RunError without `force` if a state that has copied is readable or the source's message differs from the copied
    one, and in any case if there are neither copies nor advisories of the stream.
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
        announced = last_announced(stream, site.clusters, rebuilt.unknown)
        if not len(copies) and not announced:
            raise RunError(
                f"target stream {stream.target_stream} holds no copies of {stream.label}: nothing to recover from; a run"
                f" {'goes on from the state there is' if known else 'begins it anew'}"
            )
        unknown = rebuilt.unknown
        mark_ns = compare_with_original(site, stream, source, copies, unknown, force=force) if len(copies) else None
        position = _position(site, stream, source, copies, announced)
        if stream.policy is not None:
            _rebuild_nodes(site, stream, source, copies, announced, position, rebuilt)
        state, copying = _recovered_state(site, stream, source, copies, position, known)
        state.forgotten_transition = max(state.forgotten_transition, rebuilt.highest)
        state.mark_sequence, state.mark_ns = (None, None) if mark_ns is None else (copies.last, mark_ns)
        pending = _commit(site, stream, source, state, copying, copies, rebuilt)
        files = _index_history(site, stream, state)
        request_refill(site.folder, stream)
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


class _Position(NamedTuple):
    """The first sequence to read, the stored time of the last message before it, and the new watermark (unix ns)."""

    sequence: int
    last_stored_ns: int | None
    watermark_ns: int


def _position(
    site: Site, stream: StreamSettings, source: StreamInfo, copies: Copies, announced: Mapping[str, Advisory]
) -> _Position:
    """Return the position after the last copy, else after the last announced event, else the entry's start."""
    # Whoever publishes to the target chooses the time in a copy's header.
    watermark_ns = min(copies.latest_ns, site.clock.now_ns()) if len(copies) else 0
    if copies.last is not None:
        return _Position(copies.last + 1, copies.here[-1].stored_ns, watermark_ns)
    cluster = site.clusters.connect(stream.source)
    if len(copies):
        return _Position(first_sequence(cluster, stream.start, source), None, watermark_ns)
    announced_ns = max(advisory.event_ns for advisory in announced.values())
    return _Position(sequence_at(cluster, source, announced_ns + 1), announced_ns, announced_ns)


def _rebuild_nodes(
    site: Site,
    stream: StreamSettings,
    source: StreamInfo,
    copies: Copies,
    announced: Mapping[str, Advisory],
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
    not_made = {node for created_ns, sequence, node in queued if created_ns != here or sequence > (copies.last or 0)}
    rows = nodes.all_states()
    states = {node: state_of(values) for node, _, *values in rows}
    rebuilt.classes = {node: node_class for node, node_class, *_ in rows} | rebuilt.classes
    keep_known_nodes(rebuilt, states, not_made)
    # A source with a limit per subject may lack the message of an event, whatever its first one.
    has_holes = source.messages != source.last_sequence + 1 - source.first_sequence
    is_held = source.first_sequence <= position.sequence and not has_holes
    continue_announced(stream, rebuilt, announced, states, position.watermark_ns if is_held else None)


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
