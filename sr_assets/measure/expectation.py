"""The messages of a measured fleet in the source, and those of them that the rules copy."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sr_assets.domain.blindness import NO_BLIND_SPANS
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SECOND_NS
from sr_assets.domain.senders import Document
from sr_assets.domain.tracking.rules import NodeState, Sighting, sight, splay_ns
from sr_assets.settings import StreamSettings


def needs_payloads(entry: StreamSettings) -> bool:
    """Return whether the class of a node, and so its sampling, depends on its payloads."""
    return entry.node_classes is not None and entry.node_classes.classifier.reads_payload


@dataclass(slots=True)
class Expectation:
    """The stored messages of the nodes that publish on `subjects`, and the sequences of those to copy.

    A stream without sampling copies all of them.
    """

    entry: StreamSettings
    #: The node of each subject.
    subjects: Mapping[str, str]
    stored_ns: dict[int, int] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)
    due: set[int] = field(default_factory=set)
    sequences: dict[str, list[int]] = field(default_factory=dict)
    classes: dict[str, str | None] = field(default_factory=dict)
    _states: dict[str, NodeState] = field(default_factory=dict)

    def add(self, message: Message) -> None:
        """Add the source's next message."""
        node = self.subjects.get(message.subject)
        if node is None:
            return
        sequence = message.sequence
        self.stored_ns[sequence], self.nodes[sequence] = message.stored_ns, node
        self.sequences.setdefault(node, []).append(sequence)
        if not self.entry.tracked or self._is_due(node, message):
            self.due.add(sequence)

    def is_false_timeout(self, node: str, event_ns: int) -> bool:
        """Return whether a node reported within its `warn_duration` before a timeout at `event_ns`."""
        # Seconds of version 1 are rounded down.
        before_ns = SECOND_NS if event_ns % SECOND_NS == 0 else 0
        times = (self.stored_ns[sequence] for sequence in reversed(self.sequences[node]))
        newest_ns = next((stored_ns for stored_ns in times if stored_ns < event_ns), None)
        return newest_ns is None or event_ns + before_ns - newest_ns < self.warning_ns(node)

    def warning_ns(self, node: str) -> int:
        """Return the silence after which a node times out."""
        return self.entry.policy_of(self.classes[node]).warning_ns

    def _is_due(self, node: str, message: Message) -> bool:
        classes = self.entry.node_classes
        document = Document(message.payload)
        node_class = classes.classifier.classify(node, message.headers, document) if classes else None
        policy, self.classes[node] = self.entry.policy_of(node_class), node_class
        # An emulated node never sets the force field.
        sighting = Sighting(message.sequence, message.stored_ns, message.payload_bytes, forced=False)
        splay = splay_ns(node, policy.interval_ns)
        state, decision, _ = sight(policy, splay, self._states.get(node), sighting, NO_BLIND_SPANS)
        self._states[node] = state
        return decision.copy
