"""What metrics know of one stream or feed: its part of the site's `status.json`, and its labels.

Not here: the metrics made of it (`ours`, `replicator`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sr_assets.domain.exposition import MetricKind, Sample, labels
from sr_assets.settings import Entry, FeedSettings, StreamSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

_NONE: Final[dict[str, float]] = {}


class StreamNumbers:
    """The numbers of one stream or feed as its site's last publication left them.

    `labels` are those of our metrics, `replicator_labels` those of the Stream Replicator's, `worker` is what its first
    generation called the stream. `looked_at` is when nothing was left to do for the whole site (unix seconds).
    """

    def __init__(self, entry: Entry, status: Mapping[str, Any], replicator: str, index: int) -> None:
        """Take the entry, which is the site's `index`th, and its part of the status."""
        self.entry, self.status = entry, status
        self.looked_at = 0.0
        self.replicator, self.worker = replicator, f"{entry.name}_{index}"
        self.copied = isinstance(entry, StreamSettings)
        self.feed = isinstance(entry, FeedSettings)
        self.labels = labels(name=entry.name, stream=entry.stream)
        self.replicator_labels = labels(stream=entry.stream, replicator=replicator, worker=entry.name)
        self._counters: Mapping[str, Mapping[str, float]] = status.get("counters", {})

    def number(self, key: str) -> float:
        """Return a number of the status; 0 when it has none."""
        return float(self.status.get(key) or 0)

    def counted(self, counter: str) -> float:
        """Return a counter, of all its labels together."""
        return sum(self._counters.get(counter, _NONE).values())

    def counted_by(self, counter: str) -> Mapping[str, float]:
        """Return a counter by label."""
        return self._counters.get(counter, _NONE)

    @property
    def begun(self) -> bool:
        """Whether the stream has a position."""
        return bool(self.status.get("created_ns"))

    @property
    def copied_messages(self) -> float:
        """How many copies were ever made: those that a target lost later, and a row counts no more, are among them."""
        return self.number("copied_messages") + self.counted("recalled_messages")

    @property
    def succeeded_at(self) -> float:
        """When all was done that there was to do, in unix seconds; 0: never."""
        succeeded_at = self.number("last_success_ns") / 1e9
        return succeeded_at if self.status.get("last_error") else max(succeeded_at, self.looked_at)


class Metric(NamedTuple):
    """A metric: its name, type and meaning, and how its samples follow from all streams at a time (unix seconds)."""

    name: str
    kind: MetricKind
    text: str
    samples: Callable[[Sequence[StreamNumbers], float], Iterable[Sample]]
