"""The position of a stream before a batch: loading, starting and restarting it after a change of the source."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sr_assets.adapters import times
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.state.records import Intent, StreamState
from sr_assets.domain.blindness import Span
from sr_assets.domain.errors import RunError, TransientError
from sr_assets.domain.positions import SequenceRange, first_stored_at, format_rfc3339_ns, is_credible, watermark
from sr_assets.settings import Entry, Start
from sr_assets.stages.clock import Clock

if TYPE_CHECKING:
    from sr_assets.adapters.state.store import SiteState

logger = logging.getLogger(__name__)

#: Set by `sr-assets up` and `sr-assets run`: each of them copies an ephemeral stream once.
START_VARIABLE = "SR_ASSETS_START"
_OLD_ANSWERS_SECONDS = 5.0
#: Clock differences between a cluster's servers: an earlier sequence may have a later time.
CLOCKS_DIFFER_NS = 60 * 1_000_000_000


def load_position(
    store: SiteState, cluster: Cluster, entry: Entry, source: StreamInfo, intent: Intent | None = None
) -> StreamState:
    """Return a stream's state; start it if the stream is new, and restart it if the source is another one.

    `intent` is an open batch that reads the source itself. Raises RunError if the stream must stop.
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
    elif source.last_sequence < state.source_last_sequence and ends_before(
        cluster, entry.stream, state.source_last_sequence
    ):
        logger.warning(
            "%s: source stream %s ends at %d, before %d, which it held: it was rolled back over unread messages",
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
    """Describe a source whose sequences identify other messages than those read, or return None.

    Two messages prove it: the last one read, and the source's last one when an open intent was planned. An intent of an
    earlier restart, which stays open until the target is reachable, proves nothing.
    """
    intent = intent if intent is not None and intent.starts == state.starts else None
    if state.created_ns != source.created_ns:
        return f"source stream {entry.stream} was recreated"
    edited = f"or the state was edited (then set the state aside and run `sr-assets recover --stream {entry.label}`)"
    planned = intent.source_sequence if intent and intent.source_sequence else 0
    read = max(state.next_sequence - 1 if state.has_read else 0, planned)
    if source.last_sequence < read and ends_before(cluster, entry.stream, read):
        return (
            f"source stream {entry.stream} ends at {source.last_sequence}, before {read}, the last message read: it was"
            f" rolled back, {edited}"
        )
    planned_with = [(intent.source_sequence, intent.source_ns)] if intent is not None else []
    for sequence, stored_ns in ((state.mark_sequence, state.mark_ns), *planned_with):
        if sequence is not None and not _holds(cluster, source, sequence, stored_ns):
            return (
                f"source stream {entry.stream} holds another message {sequence} than the one read: it was rolled back"
                f" and has grown since, {edited}"
            )
    return None


def changed_since(cluster: Cluster, planned: StreamInfo) -> bool:
    """Return whether a source was recreated or rolled back since a stream info.

    Called after reading a range that this info planned: the messages may belong to either source, and the next plan
    finds out.
    """
    now = cluster.stream_info(planned.stream)
    if now.created_ns != planned.created_ns or now.last_sequence < planned.last_sequence:
        return True
    return not _holds(cluster, now, planned.last_sequence, planned.last_stored_ns)


def _holds(cluster: Cluster, source: StreamInfo, sequence: int, stored_ns: int | None) -> bool:
    """Return whether a source apparently still holds the message that was stored at that sequence and time."""
    if stored_ns is None or (source.last_sequence, source.last_stored_ns) == (sequence, stored_ns):
        return True
    if not source.first_sequence <= sequence <= source.last_sequence:
        return True
    # A leaf node closes its link on the leader's response to a request for a large message.
    if cluster.settings.api_owner and source.allow_direct and cluster.direct_time(source.stream, sequence) == stored_ns:
        return True
    message = cluster.message(source.stream, sequence)
    if message is not None:
        return message.stored_ns == stored_ns
    # The message was deleted, or replaced by a later one of its subject. In a rolled-back source an earlier one would
    # be later.
    later = cluster.next_message(source.stream, sequence_at(cluster, source, stored_ns + CLOCKS_DIFFER_NS, sequence))
    return later is None or later.sequence > sequence


def ends_before(cluster: Cluster, stream: str, sequence: int) -> bool:
    """Return whether a stream ends before a sequence, even when queried again: a new leader may be out of date.

    Raises TransientError if the leader has lost its replicas.
    """
    deadline = times.monotonic() + _OLD_ANSWERS_SECONDS
    while (info := cluster.stream_info(stream)).last_sequence < sequence:
        if times.monotonic() > deadline:
            refuse_isolated(info)
            return True
        times.sleep(0.2)
    return False


def _move_to_new_source(entry: Entry, state: StreamState, source: StreamInfo, problem: str) -> None:
    """Apply `on_source_reset`: the source's sequences identify other messages than those read."""
    match entry.on_source_reset:
        case "stop":
            raise source_reset_error(problem)
        case "recopy":
            state.next_sequence = max(1, source.first_sequence)
        case "skip_to_now":
            state.next_sequence = source.last_sequence + 1
    # Another restart: its copies get other ids, so that no duplicate window drops a new message.
    state.starts += 1
    state.reset_starts = state.starts
    state.epoch_ns = max(state.epoch_ns + 1, epoch_at(source))
    state.created_ns = source.created_ns
    # Messages that the source held after the last one read are lost, so reports are unknown until the source stores its
    # next message.
    known = [ns for ns in (state.watermark_ns, state.last_stored_ns) if ns is not None]
    state.watermark_ns = state.last_stored_ns = max(known, default=None)
    state.hole_open = True
    logger.warning(
        "%s: %s; continuing at %d as restart %d (%s); last message read %d, stored %s; silence known until %s",
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
    """Return the epoch of a state that starts with this info (unix ns): a clock far ahead would outrank later epochs."""
    known = [ns for ns in (Clock.credible_ns(source.ts_ns), Clock.credible_ns(source.last_stored_ns)) if ns is not None]
    return known[0] if known else source.created_ns


def source_reset_error(problem: str) -> RunError:
    """Return the error of `on_source_reset: stop`."""
    return RunError(
        f"{problem}, so its sequences identify other messages; set on_source_reset: recopy (copy the messages it holds now"
        " from its start) or skip_to_now (from now on)"
    )


def refuse_isolated(info: StreamInfo) -> None:
    """Raise TransientError for the answer of a leader that has lost its replicas: another one may have stored more."""
    if not info.in_contact:
        raise TransientError(
            f"leader {info.leader} of stream {info.stream} has lost its replicas, and says that the stream ends at"
            f" {info.last_sequence}; waiting for another leader"
        )


def first_sequence(cluster: Cluster, start: Start, source: StreamInfo) -> int:
    earliest = max(1, source.first_sequence)
    match start.kind:
        case "end":
            return source.last_sequence + 1
        case "sequence":
            return max(earliest, start.value)
        case "time":
            return sequence_at(cluster, source, start.value)
        case "delta":
            if source.ts_ns is None:
                raise RunError(
                    f"start_delta needs the server's clock, which {source.stream}'s server (before 2.10) does not send;"
                    " use start_time"
                )
            return sequence_at(cluster, source, source.ts_ns - start.value)
        case _:
            return earliest


def sequence_at(cluster: Cluster, source: StreamInfo, time_ns: int, end: int | None = None) -> int:
    """Return the first sequence stored at or after a time, by binary search, or `end` (after the last one)."""
    held = SequenceRange(max(1, source.first_sequence), source.last_sequence + 1 if end is None else end)
    return first_stored_at(time_ns, held, lambda sequence: cluster.next_message(source.stream, sequence))


def advance(state: StreamState, source: StreamInfo, *, warning_ns: int | None, caught_up: bool) -> bool:
    """Advance the watermark, which never decreases, and update the lag, both from a stream info.

    `warning_ns` belongs to a tracked stream. Returns whether the info's clock set the watermark: then no later message is
    stored before it.

    An info with a lower last sequence than an earlier one comes from a server that fell behind: its clock does not
    prove that all messages stored until that time are known.
    """
    behind = source.last_sequence < _known_last(state)
    own_ns = Clock.own_ns()
    if state.last_stored_ns is not None and not is_credible(state.last_stored_ns, max(own_ns, source.ts_ns or 0)):
        # A wrong clock set it, and both clocks have been corrected.
        state.last_stored_ns = own_ns
    moved = watermark(
        source.ts_ns,
        state.last_stored_ns,
        replicas=source.replicas,
        warning_ns=warning_ns,
        caught_up=caught_up and not behind,
        mirror=source.mirror,
        previous_ns=state.watermark_ns,
        own_clock_ns=own_ns,
    )
    state.watermark_ns = moved.ns
    state.ahead_clocks += moved.clock_ahead
    ts_ns = None if moved.clock_ahead else source.ts_ns
    state.planned_ns = ts_ns
    state.progress_ns = ts_ns or (own_ns if moved.clock_ahead else state.last_stored_ns)
    note_source(state, source)
    if state.lag_messages == 0 or ts_ns is None or state.last_stored_ns is None:
        state.lag_ns = 0
    else:
        state.lag_ns = max(0, ts_ns - state.last_stored_ns)
    return moved.by_clock


def clock_warning(entry: Entry, source: StreamInfo, ahead_ns: int) -> str:
    """Return the line about a server time that is not used; it names the server."""
    return (
        f"{entry.label}: server {source.leader} of stream {entry.stream} says or stored {format_rfc3339_ns(ahead_ns)}, more"
        f" than an hour ahead of this machine's {format_rfc3339_ns(Clock.own_ns())}; these times are not used, and no node"
        " times out until the clocks agree; correct the wrong clock"
    )


def warn_of_blind_time(entry: Entry, spans: Sequence[Span]) -> None:
    """Log the blind span, if any."""
    if spans:
        logger.warning(
            "%s: messages of the time from %s to %s were lost before they were read; silence excludes this time (%d holes)",
            entry.label,
            format_rfc3339_ns(spans[0][0]),
            format_rfc3339_ns(spans[-1][1]),
            len(spans),
        )


def note_read(state: StreamState, sequence: int, stored_ns: int) -> None:
    """Record the last message read: another message at its sequence reveals a rolled-back source."""
    state.mark_sequence, state.mark_ns = sequence, stored_ns
    credible_ns = Clock.credible_ns(stored_ns)
    if credible_ns is not None:
        state.last_stored_ns = max(credible_ns, state.last_stored_ns or 0)
    elif state.last_stored_ns is None:
        state.last_stored_ns = Clock.own_ns()


def note_source(state: StreamState, source: StreamInfo) -> None:
    """Record the source's last sequence, never a lower one, and the lag in messages."""
    state.source_last_sequence = max(source.last_sequence, _known_last(state))
    unread = max(state.next_sequence, source.first_sequence)
    state.lag_messages = max(0, state.source_last_sequence + 1 - unread)


def _known_last(state: StreamState) -> int:
    return max(state.source_last_sequence, state.next_sequence - 1 if state.has_read else 0)
