"""Where a stream stands before a batch: its position, where a new one begins, and what a source that was made again
means.

Not here: which range comes next (`replica`), rebuilding a lost position (`recover`).
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from sr_assets.adapters import wire
from sr_assets.adapters.state.store import StreamState
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import last_origin
from sr_assets.domain.positions import SequenceRange, watermark
from sr_assets.settings import StreamSettings

if TYPE_CHECKING:
    from sr_assets.adapters.nats.cluster import Cluster, StreamInfo
    from sr_assets.settings import Entry, Start
    from sr_assets.stages.site import Site

logger = logging.getLogger(__name__)

#: Set by `sr-assets up` and `sr-assets run`: an ephemeral stream is copied again once for each of them.
START_VARIABLE = "SR_ASSETS_START"
_OLD_ANSWERS_SECONDS = 5.0


def load_position(site: Site, stream: Entry, source: StreamInfo) -> StreamState:
    """Return where the stream stands, beginning it when it is new.

    Raises RunError when it must not go on by itself, TransientError when the source's last word may be an old one.
    """
    state = site.state.load_stream(stream.stream)
    if state is None or not state.begun:
        if isinstance(stream, StreamSettings):
            _refuse_lost_state(site, stream)
        state = StreamState(
            stream.stream, source.created_ns, first_sequence(site.cluster(stream.source), stream.start, source)
        )
        state.started = os.environ.get(START_VARIABLE)
        state.progress_ns = source.ts_ns
    elif state.created_ns != source.created_ns:
        _move_to_new_source(stream, state, source, f"source stream {stream.stream} was deleted and made again")
    elif state.next_sequence > source.last_sequence + 1 and _went_back(site, stream, state):
        went = (
            f"source stream {stream.stream} ends at {source.last_sequence}, before {state.next_sequence - 1}, which was"
        )
        edited = f"or the state was edited (then set it aside and run `sr-assets recover --stream {stream.label}`)"
        _move_to_new_source(stream, state, source, f"{went} read: it went back, {edited}")
    elif isinstance(stream, StreamSettings) and stream.ephemeral and state.started != os.environ.get(START_VARIABLE):
        state.started = os.environ.get(START_VARIABLE)
        state.starts += 1
        state.next_sequence = first_sequence(site.cluster(stream.source), stream.start, source)
    else:
        return state
    if isinstance(stream, StreamSettings):
        # What an attempt that is given up left in the target is not taken for another writer's.
        target = site.cluster(stream.target).find_stream(stream.target_stream)
        state.target_checked = target.last_sequence if target else 0
    with site.state.transaction():
        site.state.save_stream(state)
        for resend in (False, True):
            site.state.clear_intent(stream.stream, resend=resend)
        site.state.copy_log(stream.stream).clear()
    return state


def _went_back(site: Site, stream: Entry, state: StreamState) -> bool:
    """Tell whether a source ends before what was read of it, for good: a new leader may answer once with an old state."""
    if not _has_read(state):
        return False
    cluster, deadline = site.cluster(stream.source), time.monotonic() + _OLD_ANSWERS_SECONDS
    while cluster.stream_info(stream.stream).last_sequence + 1 < state.next_sequence:
        if time.monotonic() > deadline:
            return True
        time.sleep(0.2)
    return False


def _has_read(state: StreamState) -> bool:
    """Tell whether the source once came to the position: one that `start_sequence` put there may lie ahead of it."""
    return bool(state.seen_messages or state.gap_messages)


def _move_to_new_source(stream: Entry, state: StreamState, source: StreamInfo, what: str) -> None:
    """Apply `on_source_reset`: its sequences mean other messages than those that were copied."""
    match stream.on_source_reset:
        case "stop":
            raise RunError(
                f"{what}: its sequences mean other messages now; set on_source_reset: recopy (copy what it holds now from"
                " its start) or skip_to_now (from now on)"
            )
        case "recopy":
            state.next_sequence = max(1, source.first_sequence)
        case "skip_to_now":
            state.next_sequence = source.last_sequence + 1
    state.created_ns = source.created_ns
    state.last_stored_ns = None
    state.source_last_sequence = 0
    logger.warning("%s: %s; going on at %d (%s)", stream.label, what, state.next_sequence, stream.on_source_reset)


def first_sequence(cluster: Cluster, start: Start, source: StreamInfo) -> int:
    """Return the first sequence that a start option asks for."""
    earliest = max(1, source.first_sequence)
    match start.kind:
        case "end":
            return source.last_sequence + 1
        case "sequence":
            return max(earliest, start.value)
        case "time":
            return _sequence_at(cluster, source, start.value)
        case "delta":
            if source.ts_ns is None:
                raise RunError(
                    f"start_delta needs the server's clock, which {source.stream}'s server (before 2.10) does not tell;"
                    " use start_time"
                )
            return _sequence_at(cluster, source, source.ts_ns - start.value)
        case _:
            return earliest


def _sequence_at(cluster: Cluster, source: StreamInfo, time_ns: int) -> int:
    """Return the first sequence stored at or after a time, by halving: stored times ascend with the sequences."""
    low, high = max(1, source.first_sequence), source.last_sequence + 1
    while low < high:
        middle = (low + high) // 2
        found = cluster.next_message(source.stream, middle)
        if found is None or found.sequence >= high:
            # Nothing is left from here to the end that was not compared yet.
            high = middle
        elif found.stored_ns >= time_ns:
            high = middle
        else:
            low = found.sequence + 1
    return low


def _refuse_lost_state(site: Site, stream: StreamSettings) -> None:
    """Stop when there is no state but the target holds copies of ours: to begin again would double them."""
    target = site.cluster(stream.target)
    if stream.ephemeral or not target.stream_exists(stream.target_stream):
        return
    info = target.stream_info(stream.target_stream)
    # All of it, once in a stream's life: on a shared target ours may lie far behind what others wrote since.
    held = SequenceRange(min(max(1, info.first_sequence), info.last_sequence + 1), info.last_sequence + 1)
    if not len(held):
        return
    with wire.Connection(stream.target, "sr-assets tail") as connection:
        for messages in wire.read_headers(connection, stream.target_stream, held):
            for message in messages:
                origin = last_origin(message.headers)
                if origin and (origin.stream, origin.replicator, origin.name) == (
                    stream.stream,
                    stream.replicator,
                    stream.name,
                ):
                    raise RunError(
                        f"there is no state for {stream.label}, but target stream {stream.target_stream} already holds"
                        f" copies of it ({origin.sequence} at {message.sequence}); run `sr-assets recover --stream"
                        f" {stream.label}`"
                    )


def advance(stream: Entry, state: StreamState, source: StreamInfo, *, level: bool) -> None:
    """Move the watermark and the lag to what this stream info says; none of it moves backwards.

    An info that knows less than an earlier one comes from a server that fell behind: its clock then says nothing about
    what was stored until now.
    """
    behind = source.last_sequence < _known_last(state)
    mark = watermark(
        source.ts_ns,
        state.last_stored_ns,
        replicas=source.replicas,
        warning_ns=stream.policy.warning_ns if stream.policy else None,
        caught_up=level and not behind,
        mirror=source.mirror,
        previous_ns=state.watermark_ns,
        own_clock_ns=time.time_ns(),
    )
    state.watermark_ns = mark.ns
    state.planned_ns = source.ts_ns
    state.progress_ns = source.ts_ns or state.last_stored_ns
    note_source(state, source)
    if state.lag_messages == 0 or source.ts_ns is None or state.last_stored_ns is None:
        state.lag_ns = 0
    else:
        state.lag_ns = max(0, source.ts_ns - state.last_stored_ns)


def note_source(state: StreamState, source: StreamInfo) -> None:
    """Note the source's last sequence, never one below what is known of it already, and the lag in messages."""
    state.source_last_sequence = max(source.last_sequence, _known_last(state))
    unread = max(state.next_sequence, source.first_sequence)
    state.lag_messages = max(0, state.source_last_sequence + 1 - unread)


def _known_last(state: StreamState) -> int:
    return max(state.source_last_sequence, state.next_sequence - 1 if _has_read(state) else 0)
