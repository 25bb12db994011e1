"""The position of a stream before a batch: loading it, beginning a new one, and what a recreated source means.

Not here: which range comes next (`reading`), the copies in the target (`replication.target_history`), rebuilding a lost
position (`replication.recover`).
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from sr_assets.adapters.state.records import StreamState
from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import clock_is_ahead, format_rfc3339_ns, watermark
from sr_assets.stages.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sr_assets.adapters.nats.cluster import Cluster
    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.adapters.state.records import Intent
    from sr_assets.adapters.state.store import SiteState
    from sr_assets.domain.blindness import Span
    from sr_assets.settings import Entry, Start

logger = logging.getLogger(__name__)

#: Set by `sr-assets up` and `sr-assets run`: an ephemeral stream is copied again once for each of them.
START_VARIABLE = "SR_ASSETS_START"
_OLD_ANSWERS_SECONDS = 5.0
#: The clocks of a cluster's servers may differ by so much: an earlier sequence may have a later time.
_CLOCKS_DIFFER_NS = 60 * 1_000_000_000


def load_position(
    store: SiteState, cluster: Cluster, entry: Entry, source: StreamInfo, intent: Intent | None = None
) -> StreamState:
    """Return a stream's state, beginning it when it is new, or anew when its source is another one.

    `intent` is a batch that reads the source itself and was left open. Raises RunError when the stream must stop.
    """
    state = store.load_stream(entry.stream)
    if state is None or not state.has_position:
        state = StreamState(entry.stream, source.created_ns, first_sequence(cluster, entry.start, source))
        state.started = os.environ.get(START_VARIABLE)
        state.progress_ns = source.ts_ns
        state.epoch_ns = epoch_at(source)
    elif problem := another_source(cluster, entry, source, state, intent):
        _move_to_new_source(entry, state, source, problem)
    elif entry.ephemeral and state.started != os.environ.get(START_VARIABLE):
        state.started = os.environ.get(START_VARIABLE)
        state.starts += 1
        state.next_sequence = first_sequence(cluster, entry.start, source)
        state.mark_sequence = state.mark_ns = None
    elif source.last_sequence < state.source_last_sequence and _ends_before(cluster, entry, state.source_last_sequence):
        logger.warning(
            "%s: source stream %s ends at %d, before %d, which it held: it went back, by messages that were not read",
            entry.label,
            entry.stream,
            source.last_sequence,
            state.source_last_sequence,
        )
        state.source_last_sequence = source.last_sequence
    else:
        return state
    with store.transaction():
        store.save_stream(state)
    return state


def another_source(
    cluster: Cluster, entry: Entry, source: StreamInfo, state: StreamState, intent: Intent | None = None
) -> str | None:
    """Return what became of the source when its sequences mean other messages than those that were read.

    Two messages tell: the last one that was read, and the last one there was when an open intent was planned. An intent
    of an earlier beginning, which stays open until the target can be reached, tells nothing.
    """
    intent = intent if intent is not None and intent.starts == state.starts else None
    if state.created_ns != source.created_ns:
        return f"source stream {entry.stream} was deleted and made again"
    edited = f"or the state was edited (then set it aside and run `sr-assets recover --stream {entry.label}`)"
    planned = intent.source_sequence if intent and intent.source_sequence else 0
    read = max(state.next_sequence - 1 if state.has_read else 0, planned)
    if source.last_sequence < read and _ends_before(cluster, entry, read):
        return (
            f"source stream {entry.stream} ends at {source.last_sequence}, before {read}, which was read: it went back,"
            f" {edited}"
        )
    planned_with = [(intent.source_sequence, intent.source_ns)] if intent is not None else []
    for sequence, stored_ns in ((state.mark_sequence, state.mark_ns), *planned_with):
        if sequence is not None and not _holds(cluster, source, sequence, stored_ns):
            return (
                f"source stream {entry.stream} holds another message {sequence} than the one that was read: it went back"
                f" and has grown since, {edited}"
            )
    return None


def changed_since(cluster: Cluster, planned: StreamInfo) -> bool:
    """Return whether a source was made again, or went back, since an info of it.

    Asked after a range was read that this info planned: what was read may then be of either. What became of the source is
    found by planning again.
    """
    now = cluster.stream_info(planned.stream)
    if now.created_ns != planned.created_ns or now.last_sequence < planned.last_sequence:
        return True
    return not _holds(cluster, now, planned.last_sequence, planned.last_stored_ns)


def _holds(cluster: Cluster, source: StreamInfo, sequence: int, stored_ns: int | None) -> bool:
    """Return whether a source still holds, as far as can be seen, the message that was stored there at that time."""
    if stored_ns is None or (source.last_sequence, source.last_stored_ns) == (sequence, stored_ns):
        return True
    if not source.first_sequence <= sequence <= source.last_sequence:
        return True
    message = cluster.message(source.stream, sequence)
    if message is not None:
        return message.stored_ns == stored_ns
    # It was deleted, or replaced by a later one of its subject. Had the source gone back, one before it would be later.
    later = cluster.next_message(source.stream, _sequence_at(cluster, source, stored_ns + _CLOCKS_DIFFER_NS, sequence))
    return later is None or later.sequence > sequence


def _ends_before(cluster: Cluster, entry: Entry, sequence: int) -> bool:
    """Return whether a source ends before a sequence, also when asked again: a new leader may be out of date."""
    deadline = time.monotonic() + _OLD_ANSWERS_SECONDS
    while cluster.stream_info(entry.stream).last_sequence < sequence:
        if time.monotonic() > deadline:
            return True
        time.sleep(0.2)
    return False


def _move_to_new_source(entry: Entry, state: StreamState, source: StreamInfo, problem: str) -> None:
    """Apply `on_source_reset`: the source's sequences hold other messages than those that were read."""
    match entry.on_source_reset:
        case "stop":
            raise source_reset_error(problem)
        case "recopy":
            state.next_sequence = max(1, source.first_sequence)
        case "skip_to_now":
            state.next_sequence = source.last_sequence + 1
    # Another beginning: its copies get other ids, so that no dedupe window drops a new message.
    state.starts += 1
    state.reset_starts = state.starts
    state.epoch_ns = max(state.epoch_ns + 1, epoch_at(source))
    state.created_ns = source.created_ns
    # What the source held after the last message read, and after what silence is known of, is lost: nobody knows who
    # reported then, until the first message that it stores from now on.
    known = [ns for ns in (state.watermark_ns, state.last_stored_ns) if ns is not None]
    state.watermark_ns = state.last_stored_ns = max(known, default=None)
    state.hole_open = True
    logger.warning(
        "%s: %s; going on at %d as beginning %d (%s); read until %d, stored %s; silence is known until %s",
        entry.label,
        problem,
        state.next_sequence,
        state.starts,
        entry.on_source_reset,
        state.mark_sequence or 0,
        _time(state.mark_ns),
        _time(state.last_stored_ns),
    )
    state.mark_sequence = state.mark_ns = None
    state.source_last_sequence = 0


def _time(ns: int | None) -> str:
    return "never" if ns is None else format_rfc3339_ns(ns)


def epoch_at(source: StreamInfo) -> int:
    """Return the epoch of a state that begins with this info, in unix ns: a clock far ahead would outrank later ones."""
    if source.ts_ns is None or clock_is_ahead(source.ts_ns, source.last_stored_ns, Clock.own_ns()):
        return source.last_stored_ns or source.created_ns
    return source.ts_ns


def source_reset_error(problem: str) -> RunError:
    """Return the refusal of `on_source_reset: stop`."""
    return RunError(
        f"{problem}: its sequences mean other messages now; set on_source_reset: recopy (copy what it holds now"
        " from its start) or skip_to_now (from now on)"
    )


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
                    f"start_delta needs the server's clock, which {source.stream}'s server (before 2.10) does not send;"
                    " use start_time"
                )
            return _sequence_at(cluster, source, source.ts_ns - start.value)
        case _:
            return earliest


def _sequence_at(cluster: Cluster, source: StreamInfo, time_ns: int, end: int | None = None) -> int:
    """Return the first sequence stored at or after a time, by halving; `end` (after the last) when none is before it."""
    low, high = max(1, source.first_sequence), source.last_sequence + 1 if end is None else end
    while low < high:
        middle = (low + high) // 2
        message = cluster.next_message(source.stream, middle)
        if message is None or message.sequence >= high:
            # All messages from here to the end have been compared.
            high = middle
        elif message.stored_ns >= time_ns:
            high = middle
        else:
            low = message.sequence + 1
    return low


def advance(
    state: StreamState, source: StreamInfo, *, warning_ns: int | None, caught_up: bool, own_clock_ns: int
) -> bool:
    """Advance the watermark, which never goes back, and measure the lag again, both by a stream info.

    `warning_ns` is that of a tracked stream; `own_clock_ns` only detects a server's clock that is far ahead. Returns whether
    the info's clock set the watermark: then no later message is stored before it.

    An info with a lower last sequence than an earlier one comes from a server that fell behind: its clock then does not
    prove that all messages stored until that time are known.
    """
    behind = source.last_sequence < _known_last(state)
    moved = watermark(
        source.ts_ns,
        state.last_stored_ns,
        replicas=source.replicas,
        warning_ns=warning_ns,
        caught_up=caught_up and not behind,
        mirror=source.mirror,
        previous_ns=state.watermark_ns,
        own_clock_ns=own_clock_ns,
    )
    state.watermark_ns = moved.ns
    state.ahead_clocks += moved.clock_ahead
    state.planned_ns = source.ts_ns
    state.progress_ns = source.ts_ns or state.last_stored_ns
    note_source(state, source)
    if state.lag_messages == 0 or source.ts_ns is None or state.last_stored_ns is None:
        state.lag_ns = 0
    else:
        state.lag_ns = max(0, source.ts_ns - state.last_stored_ns)
    return moved.by_clock


def warn_of_clock(entry: Entry, ts_ns: int) -> None:
    """Say that a source's clock is not believed."""
    logger.warning(
        "%s: the source's clock says %s, more than an hour ahead of ours and of the last message: it is not believed,"
        " silence counts up to the last message; set that server's clock",
        entry.label,
        format_rfc3339_ns(ts_ns),
    )


def warn_of_blind_time(entry: Entry, spans: Sequence[Span]) -> None:
    """Say in which time nobody knows who reported, if there is any."""
    if spans:
        logger.warning(
            "%s: messages of the time from %s to %s were gone before they were read: no silence is counted then (%d holes)",
            entry.label,
            format_rfc3339_ns(spans[0][0]),
            format_rfc3339_ns(spans[-1][1]),
            len(spans),
        )


def note_read(state: StreamState, sequence: int, stored_ns: int) -> None:
    """Record the last message that was read: another message at its sequence reveals a source that went back."""
    state.mark_sequence, state.mark_ns = sequence, stored_ns
    state.last_stored_ns = max(stored_ns, state.last_stored_ns or 0)


def note_source(state: StreamState, source: StreamInfo) -> None:
    """Record the source's last sequence, never a lower one than is known, and the lag in messages."""
    state.source_last_sequence = max(source.last_sequence, _known_last(state))
    unread = max(state.next_sequence, source.first_sequence)
    state.lag_messages = max(0, state.source_last_sequence + 1 - unread)


def _known_last(state: StreamState) -> int:
    return max(state.source_last_sequence, state.next_sequence - 1 if state.has_read else 0)
