"""Rebuild a stream's lost position and nodes from what is left: the copies in the target and the messages the source
still holds.

Also the way to take over from the Go replicator: its copies carry the same `Choria-SR-Source` header. Not here: what a
run does from there on (`replica`).

Nothing is published for what happened before the recovered position: those transitions are recorded as late and stay
unpublished. Those that follow are numbered on from what the advisory stream still holds.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

from sr_assets.adapters import wire
from sr_assets.adapters.published.history import file_range, stream_folder
from sr_assets.adapters.state.records import CopyState, StreamState
from sr_assets.adapters.state.store import BrokenStateError
from sr_assets.domain.availability import Advisory, read_message
from sr_assets.domain.blindness import NO_BLIND_SPANS
from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import SequenceRange, format_rfc3339_ns
from sr_assets.domain.provenance import Identity, find_copy
from sr_assets.domain.senders import inspect
from sr_assets.domain.subjects import advisory_pattern
from sr_assets.domain.tracking import Sighting, sight, splay_ns
from sr_assets.stages.report import StreamReport
from sr_assets.stages.site import Site
from sr_assets.stages.tracking.fold import folded_table, transition_row
from sr_assets.stages.tracking.node_rows import node_row, node_table
from sr_assets.stages.tracking.transitions import add_transitions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.domain.messages import Message
    from sr_assets.domain.tracking import NodeState, Policy, Transition
    from sr_assets.settings import ClusterSettings, Settings, StreamSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of ours found in the target.

    Its place there, the time its original was stored, its size, its sender if it says so.
    """

    target_sequence: int
    stored_ns: int
    payload_bytes: int
    sender: str | None


@dataclass(slots=True)
class Rebuilt:
    """Nodes as far as they can be told, their transitions, and what cannot be known any more."""

    nodes: dict[str, NodeState] = field(default_factory=dict)
    transitions: list[tuple[str, Transition]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def recover_stream(settings: Settings, stream: StreamSettings, *, force: bool = False) -> str:
    """Rebuild a stream's state and return what was done and what could not be known, in lines.

    `force` rebuilds the stream although its state is readable; the site's other streams keep theirs. Raises RunError when
    there is a readable state already, when the target holds nothing of ours, or when the source's
    message is another than the one that was copied.
    """
    folder = settings.home / "sites" / stream.name
    said = _set_broken_state_aside(settings, stream)
    with Site(settings, stream.name, owner="recover", run_id="recover") as site:
        known = site.state.load_stream(stream.stream)
        if known is not None and known.begun and not force:
            raise RunError(
                f"{stream.label} has a readable state in {folder}: nothing to recover; to rebuild it all the same say"
                " --force"
            )
        source = site.clusters.reach(stream.source).stream_info(stream.stream)
        site.clock.set(source.ts_ns)
        copies = _find_copies(site, stream)
        if not copies:
            raise RunError(
                f"target stream {stream.target_stream} holds no copy of {stream.label}: nothing to recover from; a run"
                " begins it anew"
            )
        last = max(copies)
        rebuilt = Rebuilt()
        _check_original(site, stream, source, last, copies[last], rebuilt)
        if stream.policy is not None:
            _rebuild_nodes(stream, stream.policy, source, copies, last, rebuilt)
            _count_on(site, stream, rebuilt)
        state, copying = _recovered_state(site, stream, source, copies, last)
        state.epoch_ns = max(source.ts_ns or site.clock.now_ns(), known.epoch_ns + 1 if known else 0)
        _commit(site, stream, state, copying, rebuilt)
        files = _index_history(site, stream, last + 1)
        site.publish()
    lines = [
        *said,
        (
            f"{stream.label}: goes on at {last + 1}; {len(copies)} copies found in {stream.target_stream}, the last one"
            f" of {last}"
        ),
        (
            f"{len(rebuilt.nodes)} nodes rebuilt, {len(rebuilt.transitions)} transitions recorded as late and not"
            f" published, {files} snapshot files kept"
        ),
        *(f"not known: {line}" for line in rebuilt.unknown),
        "not known: counters before today; they begin with the copies that were found",
    ]
    return "\n".join(lines)


def _set_broken_state_aside(settings: Settings, stream: StreamSettings) -> list[str]:
    """Move a state that cannot be read out of the way; it is never overwritten."""
    folder = settings.home / "sites" / stream.name
    file = folder / "state.duckdb"
    if not file.exists():
        return []
    try:
        with Site(settings, stream.name, owner="recover", run_id="recover", wait_seconds=10.0):
            return []
    except BrokenStateError:
        pass
    aside = folder / f"state.duckdb.broken-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    file.rename(aside)
    log = file.with_name(f"{file.name}.wal")
    if log.exists():
        # It belongs to the broken one; a new state would take it for its own.
        log.rename(aside.with_name(f"{aside.name}.wal"))
    return [f"the unreadable state is kept as {aside}"]


def _find_copies(site: Site, stream: StreamSettings) -> dict[int, Copy]:
    """Return every copy of this entry in the target, by source sequence; of several the last."""
    target = site.clusters.reach(stream.target)
    if not target.stream_exists(stream.target_stream):
        return {}
    info = target.stream_info(stream.target_stream)
    copies: dict[int, Copy] = {}
    for message in _read(stream.target, info):
        copy = find_copy(message.headers, Identity(stream.stream, stream.replicator, stream.name))
        if copy is not None:
            sender = (
                inspect(stream.extractor, None, message.subject, message.headers, message.payload)[0]
                if stream.extractor
                else None
            )
            copies[copy.sequence] = Copy(message.sequence, copy.stored_ms * 1_000_000, len(message.payload), sender)
    return copies


def _read(
    cluster: ClusterSettings, info: StreamInfo, filter_subject: str | None = None, *, until: int | None = None
) -> Iterator[Message]:
    """Read a stream from its first message, through the leader's own consumer."""
    wanted = SequenceRange(
        max(1, info.first_sequence), max(1, info.first_sequence, (info.last_sequence if until is None else until) + 1)
    )
    with wire.Connection(cluster, "sr-assets recover") as connection:
        for messages in wire.read_confirmed(
            connection, info.stream, wanted, filter_subject=filter_subject, direct=False
        ):
            yield from messages


def _check_original(
    site: Site, stream: StreamSettings, source: StreamInfo, last: int, copy: Copy, rebuilt: Rebuilt
) -> None:
    """Compare the stored time of the last copied message with its original's: another one means another stream."""
    original = site.clusters.reach(stream.source).message(stream.stream, last)
    if original is None:
        if last > source.last_sequence:
            raise RunError(
                f"source stream {stream.stream} ends at {source.last_sequence}, before {last}, which was copied: it was"
                " made again; remove the copies, or rename"
            )
        rebuilt.unknown.append(f"whether the source is the same stream: its message {last} is gone")
    elif original.stored_ns // 1_000_000 != copy.stored_ns // 1_000_000:
        raise RunError(
            f"source stream {stream.stream} holds another message {last} (stored"
            f" {format_rfc3339_ns(original.stored_ns)}) than the one that was copied (stored"
            f" {format_rfc3339_ns(copy.stored_ns)}): it was made again"
        )


def _rebuild_nodes(
    stream: StreamSettings, policy: Policy, source: StreamInfo, copies: dict[int, Copy], last: int, rebuilt: Rebuilt
) -> None:
    """Fold the copies whose originals are gone, then the source's own messages up to the position.

    What was copied is known, not decided.
    """
    gone = [(sequence, copy) for sequence, copy in sorted(copies.items()) if sequence < source.first_sequence]
    for sequence, copy in gone:
        if copy.sender is not None:
            _see(
                policy,
                rebuilt,
                copy.sender,
                Sighting(sequence, copy.stored_ns, copy.payload_bytes, forced=False),
                copied=True,
            )
    if gone:
        rebuilt.unknown.append(f"sightings before sequence {source.first_sequence} other than the copied ones")
    assert stream.extractor is not None
    for message in _read(stream.source, source, stream.filter_subject, until=last):
        sender, _ = inspect(stream.extractor, None, message.subject, message.headers, message.payload)
        if sender is not None:
            sighting = Sighting(message.sequence, message.stored_ns, len(message.payload), forced=False)
            _see(policy, rebuilt, sender, sighting, copied=message.sequence in copies)


def _see(policy: Policy, rebuilt: Rebuilt, sender: str, sighting: Sighting, *, copied: bool) -> None:
    before = rebuilt.nodes.get(sender)
    state, _, transitions = sight(policy, splay_ns(sender, policy.interval_ns), before, sighting, NO_BLIND_SPANS)
    expired = any(transition.event == "expire" for transition in transitions)
    known = None if before is None or expired else before
    if copied:
        state = replace(state, copied_ns=state.seen_ns, copied_bytes=sighting.payload_bytes)
    else:
        state = replace(
            state, copied_ns=known.copied_ns if known else None, copied_bytes=known.copied_bytes if known else None
        )
    rebuilt.nodes[sender] = state
    rebuilt.transitions += [(sender, transition) for transition in transitions]


def _count_on(site: Site, stream: StreamSettings, rebuilt: Rebuilt) -> None:
    """Let each node's transitions go on from the highest that was announced: a centre goes by the highest it was told."""
    advisory = stream.advisory
    if advisory is None:
        return
    where = stream.source if advisory.cluster == "source" else stream.target
    pattern, told = advisory_pattern(advisory.subject), dict[str, int]()
    try:
        cluster = site.clusters.reach(where)
        keepers = cluster.stream_names(pattern)
        for message in chain.from_iterable(_read(where, cluster.stream_info(name), pattern) for name in keepers):
            found = read_message(message.payload, message.stored_ns)
            if isinstance(found, Advisory) and found[:3] == (stream.replicator, stream.name, stream.stream):
                told[found.node] = max(found.transition, told.get(found.node, 0))
    except RunError as error:
        rebuilt.unknown.append(f"which transitions were announced: {error}")
        return
    if not keepers:
        rebuilt.unknown.append(f"which transitions were announced: no stream on {where.label} keeps {pattern}")
    for node, state in rebuilt.nodes.items():
        rebuilt.nodes[node] = replace(state, transition=max(state.transition, told.get(node, 0)))


def _recovered_state(
    site: Site, stream: StreamSettings, source: StreamInfo, copies: dict[int, Copy], last: int
) -> tuple[StreamState, CopyState]:
    target = site.clusters.reach(stream.target).stream_info(stream.target_stream)
    holder = max(copies, key=lambda sequence: copies[sequence].target_sequence)
    state = StreamState(
        stream.stream,
        source.created_ns,
        last + 1,
        watermark_ns=copies[last].stored_ns,
        planned_ns=source.ts_ns,
        last_stored_ns=copies[last].stored_ns,
        source_last_sequence=source.last_sequence,
        lag_messages=max(0, source.last_sequence - last),
        seen_messages=len(copies),
        as_of_ns=site.clock.now_ns(),
    )
    copying = CopyState(
        stream.stream,
        source.created_ns,
        target_stream=stream.target_stream,
        target_created_ns=target.created_ns,
        target_sequence=copies[holder].target_sequence,
        target_holds=holder,
        target_checked=target.last_sequence,
        copied_messages=len(copies),
        copied_bytes=sum(copy.payload_bytes for copy in copies.values()),
    )
    return state, copying


def _commit(site: Site, stream: StreamSettings, state: StreamState, copying: CopyState, rebuilt: Rebuilt) -> None:
    """Write the rebuilt state in the place of what there was of the stream."""
    policy, store, name = stream.policy, site.state, stream.stream
    with store.transaction():
        store.forget_stream(name)
        store.save_stream(state)
        store.save_copying(copying)
        if policy is None or not rebuilt.nodes:
            return
        store.nodes(name).merge(
            node_table([node_row(policy, node, one, NO_BLIND_SPANS) for node, one in rebuilt.nodes.items()])
        )
        folded = folded_table([transition_row(sender, transition) for sender, transition in rebuilt.transitions])
        add_transitions(store, stream, state, folded, StreamReport(stream), history=True)


def _index_history(site: Site, stream: StreamSettings, next_sequence: int) -> int:
    """Take the Parquet history that is still there into the table of the newest per node."""
    folder = stream_folder(site.settings.home.resolve(), stream.name, stream.stream)
    files = [file for file in folder.glob("date=*/[0-9]*.parquet") if file_range(file)[1] <= next_sequence]
    with site.state.transaction():
        site.state.snapshot_index(stream.stream).add(0, 0, sorted(files, key=file_range))
    return len(files)
