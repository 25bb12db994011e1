"""What became of our copies in the target since the last batch, and what follows from it.

Told apart by what the state remembers: a target that was *made again* has another created time; one that was *rolled
back* (a power failure, a restored disk) has the same, but ends before a copy it acknowledged, or holds something else
in its place; one that was *purged*, or whose messages expired, has moved its first sequence only: nothing follows.
Copies of ours that no batch made are *another writer's*, or the state is an old one: the stream stops. Not here: what a
crash left open, which the writers find out themselves (`adapters.copying`).
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from sr_assets.adapters import wire
from sr_assets.adapters.published.history import copied_sequences, stream_folder
from sr_assets.adapters.state.store import gap_row
from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import SequenceRange, merge_ranges
from sr_assets.domain.provenance import Identity, find_copy, other_writer

if TYPE_CHECKING:
    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.adapters.state.store import StreamState
    from sr_assets.settings import StreamSettings
    from sr_assets.stages.site import Site

logger = logging.getLogger(__name__)


def review_target(site: Site, stream: StreamSettings, source: StreamInfo, state: StreamState) -> None:
    """Compare the target with what the state remembers of it, and commit what is to be sent again.

    Raises RunError when the stream must not go on by itself: `on_target_reset: stop`, or another writer's copies.
    """
    target = site.cluster(stream.target).find_stream(stream.target_stream)
    if state.target_created_ns and (target is None or target.created_ns != state.target_created_ns):
        _follow_new_target(site, stream, source, state, target)
    elif target is not None and state.target_sequence and _rolled_back(site, stream, state, target):
        _note_rollback(site, stream, state, target)
    # An open batch may be of a target that went before anything was committed, or that was made since.
    intents = [site.state.open_intent(stream.stream, resend=resend) for resend in (False, True)]
    if target is not None and any(one is not None and one.target_created_ns != target.created_ns for one in intents):
        with site.state.transaction():
            _move_intent(site, stream, created_ns=target.created_ns, target_sequence=0, waits=False)


def refuse_other_writer(stream: StreamSettings, state: StreamState, target: StreamInfo) -> None:
    """Stop when copies of ours stand behind the last one that a batch of this state made.

    Others' messages there are only looked at once: `target_checked` moves with the next intent.
    """
    checked = max(state.target_checked, state.target_sequence)
    behind = SequenceRange(checked + 1, max(checked, target.last_sequence) + 1)
    if stream.ephemeral or not state.target_created_ns or not len(behind):
        return
    for sequence in _read_copies(stream, state, behind).values():
        raise RunError(other_writer(stream.target_stream, _identity(stream), sequence))


def _identity(stream: StreamSettings) -> Identity:
    return Identity(stream.stream, stream.replicator, stream.name)


def _read_copies(stream: StreamSettings, state: StreamState, held: SequenceRange) -> dict[int, int]:
    """Return the source sequences of this entry's copies in a part of the target, by their places, in order."""
    found: dict[int, int] = {}
    with wire.Connection(stream.target, "sr-assets review") as connection:
        for message in itertools.chain.from_iterable(wire.read_headers(connection, stream.target_stream, held)):
            copy = find_copy(message.headers, _identity(stream), state.created_ns)
            if copy is not None:
                found[message.sequence] = copy.sequence
    return found


# ------------------------------------------------------------------------------------------------------- made again


def _follow_new_target(
    site: Site, stream: StreamSettings, source: StreamInfo, state: StreamState, target: StreamInfo | None
) -> None:
    """Apply `on_target_reset`: nothing that was copied before stands in this target."""
    if stream.on_target_reset == "stop":
        raise RunError(
            f"target stream {stream.target_stream} was deleted{' and made again' if target else ''}: what was copied "
            "before is not in it; set on_target_reset: continue (go on with what is new) or recopy (also copy again what "
            "the source still has)"
        )
    again: list[SequenceRange] = []
    if stream.on_target_reset == "recopy":
        again = _copied_before(site, stream, source, state)
    logger.warning(
        "%s: target stream %s was %s; %d messages are copied again (on_target_reset: %s)",
        stream.label,
        stream.target_stream,
        "made again" if target else "deleted",
        sum(map(len, again)),
        stream.on_target_reset,
    )
    state.target_created_ns = target.created_ns if target else 0
    state.target_sequence = state.target_holds = state.target_checked = 0
    copy_log = site.state.copy_log(stream.stream)
    with site.state.transaction():
        copy_log.clear()
        copy_log.add_resends(again, stood=False)
        _move_intent(site, stream, created_ns=state.target_created_ns, target_sequence=0, waits=False)
        site.state.save_stream(state)


def _copied_before(site: Site, stream: StreamSettings, source: StreamInfo, state: StreamState) -> list[SequenceRange]:
    """Return what was copied so far and may still be in the source: of a sampled stream what its history holds."""
    whole = SequenceRange(max(1, source.first_sequence), max(1, source.first_sequence, state.next_sequence))
    if not stream.tracked:
        return [whole]
    folder = stream_folder(site.settings.home.resolve(), stream.name, stream.stream)
    sequences = copied_sequences(folder, since_ns=state.created_ns)
    return merge_ranges(SequenceRange(one, one + 1) for one in sequences if one in whole)


def _move_intent(site: Site, stream: StreamSettings, *, created_ns: int, target_sequence: int, waits: bool) -> None:
    """Let the open intents begin to look for copies where the target ends now; called inside a transaction."""
    for resend in (False, True):
        if intent := site.state.open_intent(stream.stream, resend=resend):
            moved = replace(intent, target_created_ns=created_ns, target_sequence=target_sequence)
            site.state.save_intent(replace(moved, waits=waits and not resend))


# ------------------------------------------------------------------------------------------------------ rolled back


def _rolled_back(site: Site, stream: StreamSettings, state: StreamState, target: StreamInfo) -> bool:
    """Tell whether the target took back a copy it had acknowledged: it ends before, or another message stands there."""
    if target.last_sequence < state.target_sequence:
        return True
    if target.first_sequence > state.target_sequence:
        return False
    stored = site.cluster(stream.target).message(stream.target_stream, state.target_sequence)
    copy = find_copy(stored.headers, _identity(stream), state.created_ns) if stored else None
    return stored is not None and (copy is None or copy.sequence != state.target_holds)


def _note_rollback(site: Site, stream: StreamSettings, state: StreamState, target: StreamInfo) -> None:
    """Find the last copy that still stands where it stood, and ask for everything behind it to be sent again.

    What was copied more than an hour ago is not known one by one: it is recorded as lost.
    """
    copy_log = site.state.copy_log(stream.stream)
    copies = copy_log.copies()
    held = SequenceRange(max(1, target.first_sequence), max(1, target.first_sequence, target.last_sequence + 1))
    standing = _read_copies(stream, state, held)
    kept = [(at, sequence) for at, sequence in copies if standing.get(at) == sequence]
    # Without one of the last hour that still stands, the last of ours that does, however old it is.
    at, sequence = kept[-1] if kept else max(standing.items(), default=(target.first_sequence - 1, 0))
    there = set(standing.values())
    lost = [one for place, one in copies if place > at and place >= held.first and one not in there]
    known_from = next((copy for copy in copies if copy[0] > at), (state.target_sequence + 1, state.target_holds + 1))
    unknown = 0 if kept or known_from[1] <= sequence + 1 else max(0, known_from[0] - at - 1)
    intent = site.state.open_intent(stream.stream)
    waits = intent is not None and not any(intent.first <= one < intent.next for one in there)
    logger.error(
        "%s: target stream %s was rolled back from %d to %d: %d copies are sent again, %d cannot be told",
        stream.label,
        stream.target_stream,
        state.target_sequence,
        at,
        len(lost),
        unknown,
    )
    state.target_sequence, state.target_holds = max(0, at), sequence
    state.target_checked = target.last_sequence
    with site.state.transaction():
        if unknown:
            state.gap_messages += unknown
            hole = SequenceRange(sequence + 1, known_from[1])
            gap = gap_row(stream.stream, hole, unknown, "lost", site.now_ns())
            site.state.add_rows("gaps", pa.Table.from_pylist([gap]))
        copy_log.keep_until(at)
        copy_log.add_resends(merge_ranges(SequenceRange(one, one + 1) for one in lost), stood=True)
        since = target.last_sequence if waits else min(at, target.last_sequence)
        _move_intent(site, stream, created_ns=target.created_ns, target_sequence=since, waits=waits)
        site.state.save_stream(state)
