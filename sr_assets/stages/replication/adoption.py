"""Copies that a later state of this site has made: this state is an older one, such as a checkpoint or a restored backup.

The site reads their messages again and makes the same decisions; each batch then finds its copies and makes only the
missing ones.
"""

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace

from sr_assets.adapters import wire
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.state.records import CopyState, Intent, StreamState
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.provenance import Identity, find_copy
from sr_assets.stages.progress import LongWork
from sr_assets.stages.replication.context import CopyContext
from sr_assets.stages.replication.found_copies import Copy, FoundCopies
from sr_assets.stages.replication.target import copies_pattern

logger = logging.getLogger(__name__)


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
    front, resends = store.copy_queue(name).front(1, 1), store.copy_log(name).resends(1)
    return [*([front.covered.first] if front else []), *(resend.covered.first for resend in resends)]


def _read_copies(context: CopyContext, copying: CopyState, target: StreamInfo, held: SequenceRange) -> Iterator[Copy]:
    stream = context.stream
    if not len(held):
        return
    identity = Identity(stream.stream, stream.replicator, stream.name)
    pattern = copies_pattern(stream, target)
    label = f"{stream.label}: searching {stream.target_stream} for copies made after this state"
    with LongWork(label, len(held)) as progress, wire.Connection(stream.target, "sr-assets review") as connection:
        lists = wire.read_headers(connection, stream.target_stream, held, pattern)
        for message in itertools.chain.from_iterable(lists):
            copy = find_copy(message.headers, identity, copying.created_ns)
            # A restart copies messages again that an earlier one has copied.
            if copy and not copy.is_before(copying.starts):
                yield Copy(message.sequence, copy.sequence, copy.stored_ms * 1_000_000, 0, None)
            progress.reached(message.sequence + 1 - held.first)
