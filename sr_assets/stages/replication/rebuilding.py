"""The rules that rebuild a stream's nodes from its copies and from the messages that the source still holds.

Pure functions: no queries, no writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

from sr_assets.domain.blindness import NO_BLIND_SPANS, BlindSpans
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SECOND_NS
from sr_assets.domain.received import STATUS, Advisory
from sr_assets.domain.senders import inspect, inspect_class
from sr_assets.domain.tracking.class_policies import class_of
from sr_assets.domain.tracking.rows import node_row
from sr_assets.domain.tracking.rules import NodeState, Sighting, Status, Transition, sight, splay_ns

if TYPE_CHECKING:
    from sr_assets.settings import StreamSettings
    from sr_assets.stages.replication.copies import Copies
    from sr_assets.stages.replication.found_copies import Copy


T = TypeVar("T")


@dataclass(slots=True)
class Rebuilt:
    """The rebuilt nodes with their classes and transitions, the blind spans, and a list of unknown facts.

    `highest` is the highest announced number of a node that the next run finds again.
    """

    nodes: dict[str, NodeState] = field(default_factory=dict)
    classes: dict[str, str | None] = field(default_factory=dict)
    transitions: list[tuple[str, Transition, str | None]] = field(default_factory=list)
    blind: BlindSpans = NO_BLIND_SPANS
    unknown: list[str] = field(default_factory=list)
    highest: int = 0


def rebuild_nodes(
    stream: StreamSettings, copies: Copies, first_sequence: int, messages: Iterable[Message], rebuilt: Rebuilt
) -> None:
    """Fold the source's messages in order, and the copies whose originals the source no longer holds.

    A source with a limit per subject loses messages between others. The target shows whether a message was copied; the
    decision of `sight` is ignored.
    """
    for earlier in copies.earlier:
        _see_copy(stream, rebuilt, earlier)
    if copies.here.before(first_sequence):
        rebuilt.unknown.append(f"sightings before sequence {first_sequence} other than the copied ones")
    left = iter(copies.here)
    copy = next(left, None)
    for message in messages:
        while copy is not None and copy.sequence < message.sequence:
            _see_copy(stream, rebuilt, copy)
            copy = next(left, None)
        is_copied = copy is not None and copy.sequence == message.sequence
        if is_copied:
            copy = next(left, None)
        sender, node_class = _inspect(stream, message)
        if sender is not None:
            sighting = Sighting(message.sequence, message.stored_ns, len(message.payload), forced=False)
            _see(stream, rebuilt, sender, node_class, sighting, copied=is_copied)
    for lost in chain(() if copy is None else (copy,), left, copies.undone):
        _see_copy(stream, rebuilt, lost)


def _inspect(stream: StreamSettings, message: Message) -> tuple[str | None, str | None]:
    """Return the sender and the class of a message."""
    assert stream.extractor is not None  # settings require it of a tracked stream
    content = message.subject, message.headers, message.payload
    if stream.node_classes is None:
        return inspect(stream.extractor, None, *content)[0], None
    sender, _, node_class = inspect_class(stream.extractor, None, stream.node_classes.classifier, *content)
    return sender, node_class


def _see_copy(stream: StreamSettings, rebuilt: Rebuilt, copy: Copy) -> None:
    if copy.sender is None:
        return
    before = rebuilt.classes.get(copy.sender)
    node_class = stream.node_classes.classifier.reclassify(copy.sender, before) if stream.node_classes else None
    sighting = Sighting(copy.sequence, copy.stored_ns, copy.payload_bytes, forced=False)
    _see(stream, rebuilt, copy.sender, node_class, sighting, copied=True)


def _see(
    stream: StreamSettings, rebuilt: Rebuilt, sender: str, node_class: str | None, sighting: Sighting, *, copied: bool
) -> None:
    before, class_before = rebuilt.nodes.get(sender), rebuilt.classes.get(sender)
    policy, silence = stream.policy_of(node_class), stream.policy_of(class_before)
    splay = splay_ns(sender, policy.interval_ns)
    state, _, transitions = sight(policy, splay, before, sighting, rebuilt.blind, silence=silence)
    expired = any(transition.event == "expire" for transition in transitions)
    known = None if before is None or expired else before
    if copied:
        state = replace(state, copied_ns=state.seen_ns, copied_bytes=sighting.payload_bytes)
    else:
        state = replace(
            state, copied_ns=known.copied_ns if known else None, copied_bytes=known.copied_bytes if known else None
        )
    rebuilt.nodes[sender], rebuilt.classes[sender] = state, node_class
    rebuilt.transitions += [(sender, event, class_of(event, class_before, node_class)) for event in transitions]


def keep_known_nodes(rebuilt: Rebuilt, known: Mapping[str, NodeState], not_made: Collection[str | None]) -> None:
    """Keep the nodes of a readable state that cannot be rebuilt; counters never decrease.

    `not_made` are nodes with a decided copy that will not be made: the next message of such a node is copied.
    """
    for node, state in known.items():
        kept = replace(state, copied_ns=None, copied_bytes=None) if node in not_made else state
        rebuilt.nodes.setdefault(node, kept)
    continue_counters(rebuilt, {node: state.transition for node, state in known.items()})


def continue_counters(rebuilt: Rebuilt, highest: Mapping[str, int]) -> None:
    """Continue each node's transitions after its highest known number."""
    for node, state in rebuilt.nodes.items():
        rebuilt.nodes[node] = replace(state, transition=max(state.transition, highest.get(node, 0)))


def continue_announced(
    stream: StreamSettings,
    rebuilt: Rebuilt,
    announced: Mapping[str, Advisory],
    states: Mapping[str, NodeState],
    read_after_ns: int | None,
) -> None:
    """Continue each node after its last stored advisory: its number, and its status unless a later message changed it.

    A readable state may know later transitions, which wait in its outbox. The next run reads all messages after
    `read_after_ns`, unless it is None, and finds the same events in them, with the same ids: a status from then on would date
    these messages too late, so that they are copied too early.
    """
    found_again = {
        node
        for node, advisory in announced.items()
        if read_after_ns is not None
        and advisory.event_ns > read_after_ns
        and not _is_by_hand(stream, rebuilt.classes.get(node), advisory)
    }
    # An event that is found again is counted again.
    continue_counters(rebuilt, {node: each.transition - (node in found_again) for node, each in announced.items()})
    for node, advisory in announced.items():
        if node in states and _is_outdated(advisory, states[node]):
            continue
        known, event_ns, status = rebuilt.nodes.get(node), advisory.event_ns, STATUS[advisory.event_code]
        if node in found_again:
            if known is None:
                rebuilt.highest = max(rebuilt.highest, advisory.transition)
            continue
        if known is None:
            # A recovered node was seen at the event; `age` then counts the silence before it.
            silent_ns = 0 if status is Status.UP else round((advisory.age_seconds or 0) * SECOND_NS)
            seen_ns = event_ns - silent_ns
            known = NodeState(seen_ns, seen_ns, 0, None, None, status, event_ns, None, 0, advisory.transition)
        if known.seen_ns <= event_ns and known.status is not Status.RETIRED:
            retired = status is Status.RETIRED
            known = replace(
                known,
                status=status,
                status_since_ns=event_ns,
                retired_at_ns=event_ns if retired else None,
                times_retired=known.times_retired + retired,
            )
            if retired:
                known = replace(known, copied_ns=None, copied_bytes=None)
        rebuilt.nodes[node] = known


def _is_by_hand(stream: StreamSettings, node_class: str | None, advisory: Advisory) -> bool:
    """Return whether an operator may have retired a node: its silence was too short."""
    silent_ns = (advisory.age_seconds or 0) * SECOND_NS
    return STATUS[advisory.event_code] is Status.RETIRED and silent_ns < stream.policy_of(node_class).interval_ns


def _is_outdated(advisory: Advisory, state: NodeState) -> bool:
    """Return whether a node's state is later than its last advisory: `unretire` makes no transition."""
    undone = STATUS[advisory.event_code] is Status.RETIRED and state.status is not Status.RETIRED
    return state.transition > advisory.transition or (undone and state.transition == advisory.transition)


def node_rows(stream: StreamSettings, rebuilt: Rebuilt) -> Iterator[tuple[Any, ...]]:
    """Yield the rebuilt nodes as rows for `node_table`."""
    for node, state in rebuilt.nodes.items():
        node_class = rebuilt.classes.get(node)
        yield node_row(stream.policy_of(node_class), node, state, rebuilt.blind, node_class)


def portions(rows: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield rows in lists of `size` rows."""
    left = iter(rows)
    return iter(lambda: list(islice(left, size)), [])
