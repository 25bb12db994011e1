"""The nodes of a lost state, rebuilt from the target's copies, the source's messages, and the stored advisories."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Final, NamedTuple

from sr_assets.domain.blindness import NO_BLIND_SPANS, BlindSpans
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SECOND_NS
from sr_assets.domain.received import STATUS, Advisory
from sr_assets.domain.senders import inspect, inspect_class
from sr_assets.domain.tracking.class_policies import class_of
from sr_assets.domain.tracking.rows import node_row
from sr_assets.domain.tracking.rules import NodeState, Policy, Sighting, Status, Transition, sight, splay_ns
from sr_assets.settings import StreamSettings
from sr_assets.stages.replication.found_copies import Copy
from sr_assets.stages.replication.target_copies import Copies

_MILLISECOND_NS: Final = 1_000_000


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
    # Unless a run has followed the rollback, the undone copies are the last ones.
    before, after = ((), copies.undone) if copies.source_is_another else (copies.undone, ())
    for earlier in chain(copies.earlier, before):
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
        sender, node_class = inspect_sender(stream, message)
        if sender is not None:
            sighting = Sighting(message.sequence, message.stored_ns, len(message.payload), forced=False)
            _see(stream, rebuilt, sender, node_class, sighting, copied=is_copied)
    for lost in chain(() if copy is None else (copy,), left, after):
        _see_copy(stream, rebuilt, lost)


def inspect_sender(stream: StreamSettings, message: Message) -> tuple[str | None, str | None]:
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
    last_copy = (before.copied_ns, before.copied_bytes) if before and not expired else (None, None)
    copied_ns, copied_bytes = (state.seen_ns, sighting.payload_bytes) if copied else last_copy
    rebuilt.nodes[sender] = replace(state, copied_ns=copied_ns, copied_bytes=copied_bytes)
    rebuilt.classes[sender] = node_class
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


def sampled_since(stream: StreamSettings, rebuilt: Rebuilt, announced: Announced, until_ns: int) -> int:
    """Return since when, until `until_ns`, nodes that are up may have sent messages that the source lacks.

    Such a node was copied once in an interval, and the time between two messages. Longer silence has been announced.
    """
    told = {node: each for node in announced.last if (each := announced.at_position(node)) is not None}
    up_since = {node: each.event_ns for node, each in told.items() if STATUS[each.event_code] is Status.UP}
    seen_ns = [event_ns for node, event_ns in up_since.items() if node not in rebuilt.nodes]
    for node, state in rebuilt.nodes.items():
        is_told = node in told and (node in up_since or told[node].event_ns < state.seen_ns)
        interval_ns = stream.policy_of(rebuilt.classes.get(node)).interval_ns
        is_recent = node not in told and until_ns - state.seen_ns < 2 * interval_ns
        if state.status is Status.UP and (is_told or is_recent):
            seen_ns.append(state.seen_ns)
    return min(seen_ns, default=until_ns)


def node_rows(stream: StreamSettings, rebuilt: Rebuilt) -> Iterator[tuple[Any, ...]]:
    """Yield the rebuilt nodes as rows for `node_table`."""
    for node, state in rebuilt.nodes.items():
        node_class = rebuilt.classes.get(node)
        yield node_row(stream.policy_of(node_class), node, state, rebuilt.blind, node_class)


@dataclass(slots=True)
class Announced:
    """A stream's stored advisories, by the messages that the next run reads again: those stored from `reread_ns` on.

    By node, `last` is the one with the highest number, by which a centre ranks, and `before` the last one that those messages
    cannot cause again. `after` are the others; of these, `times_ns` has the stored time of the message by event id: of a
    silence, the last one before it. No message causes an event again if `reread_ns` is None.
    """

    reread_ns: int | None = None
    last: dict[str, Advisory] = field(default_factory=dict)
    before: dict[str, Advisory] = field(default_factory=dict)
    after: list[Advisory] = field(default_factory=list)
    times_ns: dict[str, int] = field(default_factory=dict)

    def note(self, advisory: Advisory) -> None:
        """Add an advisory."""
        _keep_highest(self.last, advisory)
        if self._is_before(advisory):
            _keep_highest(self.before, advisory)
        else:
            self.after.append(advisory)

    def at_position(self, node: str) -> Advisory | None:
        """Return the last advisory of a node that the messages do not cause again, or None without one."""
        last = self.last[node]
        return self.before.get(node) if last.event_id in self.times_ns else last

    def _is_before(self, advisory: Advisory) -> bool:
        # Silence that began before may have included blind time that is no longer known.
        if self.reread_ns is None or advisory.event_ns < self.reread_ns:
            return True
        return (
            STATUS[advisory.event_code] is not Status.UP and _told_seen_ns(advisory) + _MILLISECOND_NS < self.reread_ns
        )

    def find_messages(self, stream: StreamSettings, messages: Iterable[Message]) -> int | None:
        """Find the messages of the later events; without one of them, no event counts as caused again.

        A rollback may have undone a message without a copy. Returns the latest time (unix ns) of such a message.
        """
        assert self.reread_ns is not None  # else there are none
        stored_ns: dict[str | None, list[int]] = {event.node: [] for event in self.after}
        for message in messages:
            sender, _ = inspect_sender(stream, message)
            if sender in stored_ns:
                stored_ns[sender].append(message.stored_ns)
        undone_ns = None
        for event in self.after:
            told_ns = _told_seen_ns(event)
            # A silence begins with the last message; an event may be later than its message.
            until_ns = told_ns if STATUS[event.event_code] is Status.UP else told_ns + _MILLISECOND_NS
            own = [ns for ns in stored_ns[event.node] if until_ns - _MILLISECOND_NS <= ns <= until_ns]
            if own:
                self.times_ns[event.event_id] = max(own)
            elif told_ns <= self.reread_ns + _MILLISECOND_NS:
                # Its message was stored at the same time, before the position.
                _keep_highest(self.before, event)
            else:
                undone_ns = max(undone_ns or 0, told_ns)
        if undone_ns is not None:
            self.reread_ns, self.before, self.times_ns = None, self.last, {}
        return undone_ns


def _keep_highest(kept: dict[str, Advisory], advisory: Advisory) -> None:
    """Keep an advisory if its node has none of a higher or equal number."""
    held = kept.get(advisory.node)
    if held is None or advisory.transition > held.transition:
        kept[advisory.node] = advisory


def _told_seen_ns(advisory: Advisory) -> int:
    """Return when an advisory's node was seen last, at most a millisecond early, or 0 if it does not tell."""
    if STATUS[advisory.event_code] is Status.UP:
        return advisory.event_ns
    if advisory.age_seconds is None or not advisory.transition:
        # The Stream Replicator's ages are whole seconds.
        return 0
    return advisory.event_ns - round(advisory.age_seconds * SECOND_NS) - _MILLISECOND_NS // 2


def refine_times(stream: StreamSettings, rebuilt: Rebuilt, announced: Announced) -> None:
    """Give nodes the time of their last message that an announced timeout tells, if it is another than the rebuilt one.

    A copy's header names milliseconds, and the source may have lost a message that was not copied. The next run would announce
    the same silence with another time and id.
    """
    for timeout in announced.before.values():
        state, told_ns = rebuilt.nodes.get(node := timeout.node), _told_seen_ns(timeout)
        if state is None or state.status is not Status.UP or STATUS[timeout.event_code] is not Status.TIMEOUT:
            continue
        seen_ns = max(state.seen_ns, told_ns)
        warning_ns = stream.policy_of(rebuilt.classes.get(node)).warning_ns
        cut_ns = timeout.event_ns - rebuilt.blind.exceeds_at_ns(seen_ns, warning_ns)
        if abs(cut_ns) < _MILLISECOND_NS:
            seen_ns += cut_ns
        rebuilt.nodes[node] = replace(state, seen_ns=seen_ns)


def continue_announced(
    stream: StreamSettings, rebuilt: Rebuilt, announced: Announced, states: Mapping[str, NodeState]
) -> None:
    """Continue each node after its last stored advisory: its number, and its status unless a later message changed it.

    A readable state may know later transitions, which wait in its outbox. The next run reads the messages from the new
    position on again, and finds the same events in them, with the same ids: a status from then on would date these
    messages too late, so that they are copied too early. Such a node continues after its last event before.
    """
    found_again = {node for node, told in announced.last.items() if _is_found_again(stream, rebuilt, told, announced)}
    # An event that is found again is counted again.
    numbers = {node: each.transition - (node in found_again) for node, each in announced.last.items()}
    continue_counters(rebuilt, numbers)
    for node, last in announced.last.items():
        if node in states and _is_outdated(last, states[node]):
            continue
        known, advisory = rebuilt.nodes.get(node), announced.before.get(node) if node in found_again else last
        if advisory is None:
            if known is None:
                rebuilt.highest = max(rebuilt.highest, last.transition)
            continue
        event_ns, status = advisory.event_ns, STATUS[advisory.event_code]
        if known is None:
            # A recovered node was seen at the event; `age` then counts the silence before it.
            silent_ns = 0 if status is Status.UP else round((advisory.age_seconds or 0) * SECOND_NS)
            seen_ns = event_ns - silent_ns
            known = NodeState(seen_ns, seen_ns, 0, None, None, status, event_ns, None, 0, numbers[node])
        if known.seen_ns <= event_ns and known.status is not Status.RETIRED:
            retired = status is Status.RETIRED
            known = replace(
                known,
                seen_ns=max(known.seen_ns, _told_seen_ns(advisory)),
                status=status,
                status_since_ns=event_ns,
                retired_at_ns=event_ns if retired else None,
                times_retired=known.times_retired + retired,
            )
            if retired:
                known = replace(known, copied_ns=None, copied_bytes=None)
        rebuilt.nodes[node] = known


def _is_found_again(stream: StreamSettings, rebuilt: Rebuilt, advisory: Advisory, announced: Announced) -> bool:
    """Return whether the messages that are read again make an event again, at the same time.

    An operator may have retired the node, whose silence was too short.
    """
    interval_ns = stream.policy_of(rebuilt.classes.get(advisory.node)).interval_ns
    by_operator = (
        STATUS[advisory.event_code] is Status.RETIRED and (advisory.age_seconds or 0) * SECOND_NS < interval_ns
    )
    return not by_operator and advisory.event_id in announced.times_ns


def restore_blind_time(stream: StreamSettings, rebuilt: Rebuilt, announced: Announced) -> None:
    """Add the blind time that only the length of announced silences shows.

    The next run finds them again, and would announce each that ends at another time. An added span lies within every silence
    that lacks it, and begins after the silences that ended earlier.
    """
    silences = [
        _Silence(
            announced.times_ns[each.event_id],
            each.event_ns,
            stream.policy_of(rebuilt.classes.get(each.node)),
            STATUS[each.event_code] is Status.RETIRED,
        )
        for each in announced.after
        if STATUS[each.event_code] is not Status.UP and each.event_id in announced.times_ns
    ]
    longer = [silence for silence in silences if silence.lack_ns(rebuilt.blind) > _MILLISECOND_NS]
    for silence in sorted(longer, key=lambda each: each.until_ns):
        lack_ns = silence.lack_ns(rebuilt.blind)
        if lack_ns > _MILLISECOND_NS:
            latest_ns = silence.until_ns - lack_ns
            begun_ns = [each.begun_ns(rebuilt.blind) for each in longer]
            ended_ns = [each.until_ns + 1 for each in silences]
            start_ns = max(ns for ns in (*begun_ns, *ended_ns) if ns <= latest_ns)
            rebuilt.blind = rebuilt.blind.add([(start_ns, start_ns + lack_ns)])


class _Silence(NamedTuple):
    """A silence that ended in a timeout, or in an `expire`: since when, until when (unix ns), and its node's policy."""

    seen_ns: int
    until_ns: int
    policy: Policy
    expired: bool

    def begun_ns(self, blind: BlindSpans) -> int:
        """Return since when blind time delays its end alone."""
        return blind.exceeds_at_ns(self.seen_ns, self.policy.warning_ns) + 1 if self.expired else self.seen_ns

    def lack_ns(self, blind: BlindSpans) -> int:
        """Return how much later it ended than with this blind time."""
        limit_ns = self.policy.interval_ns if self.expired else self.policy.warning_ns
        return self.until_ns - blind.exceeds_at_ns(self.seen_ns, limit_ns)


def _is_outdated(advisory: Advisory, state: NodeState) -> bool:
    """Return whether a node's state is later than its last advisory: `unretire` makes no transition."""
    undone = STATUS[advisory.event_code] is Status.RETIRED and state.status is not Status.RETIRED
    return state.transition > advisory.transition or (undone and state.transition == advisory.transition)
