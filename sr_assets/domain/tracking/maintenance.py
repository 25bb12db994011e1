"""Maintenance windows: which transitions of a node are not announced, until when, and how much time windows cover."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from sr_assets.domain.blindness import Span, merge_spans
from sr_assets.domain.messages import LAST_NS
from sr_assets.domain.positions import SECOND_NS
from sr_assets.domain.tracking.rules import Event

if TYPE_CHECKING:
    from croniter import croniter

_MINUTE_NS: Final = 60 * SECOND_NS
#: The most windows that follow one another without a gap and count as one.
_MOST_JOINED: Final = 366


@dataclass(frozen=True, slots=True)
class Window:
    """A window of nodes that match one of the globs and have one of the classes: once, `[from_ns, to_ns)`, or `length_ns`
    from each start of `cron`.

    The cron expression is in UTC. Without globs, or without classes, all nodes match.
    """

    id: str
    globs: tuple[str, ...] = ()
    from_ns: int = 0
    to_ns: int = 0
    cron: str | None = None
    length_ns: int = 0
    reason: str = ""
    classes: tuple[str, ...] = ()

    def matches(self, node: str, node_class: str | None) -> bool:
        """Return whether the window is about a node of a class."""
        if self.classes and node_class not in self.classes:
            return False
        return not self.globs or any(fnmatchcase(node, glob) for glob in self.globs)

    def end_ns(self, at_ns: int) -> int | None:
        """Return the end of the window that covers a time, or None if none does."""
        if self.cron is None:
            return self.to_ns if self.from_ns <= at_ns < self.to_ns else None
        end_ns = _last_start_ns(self.cron, at_ns // _MINUTE_NS) + self.length_ns
        return end_ns if at_ns < end_ns else None

    def spans(self, since_ns: int, until_ns: int) -> Iterator[Span]:
        """Yield the parts of a time that the window covers; those of a cron expression may overlap."""
        if self.cron is None:
            yield max(self.from_ns, since_ns), min(self.to_ns, until_ns)
            return
        starts = _schedule(self.cron, (since_ns - self.length_ns) // SECOND_NS - 1)
        while (start_ns := int(starts.get_next(datetime).timestamp()) * SECOND_NS) < until_ns:
            yield max(start_ns, since_ns), min(start_ns + self.length_ns, until_ns)


@lru_cache(maxsize=10_000)
def _last_start_ns(cron: str, minute: int) -> int:
    """Return the last start of a cron expression until a minute since 1970; starts are whole minutes."""
    # croniter searches before its argument.
    starts = _schedule(cron, minute * _MINUTE_NS // SECOND_NS + 1)
    return int(starts.get_prev(datetime).timestamp()) * SECOND_NS


def _schedule(cron: str, at_seconds: int) -> "croniter":
    """Return the starts of a cron expression around a time (unix seconds)."""
    # Executors of a cluster import this module without it.
    from croniter import croniter

    return croniter(cron, datetime.fromtimestamp(at_seconds, UTC))


def covered(windows: Sequence[Window], since_ns: int, until_ns: int) -> list[Span]:
    """Return the parts of a time that windows cover, in order and disjoint."""
    return merge_spans(span for window in windows for span in window.spans(since_ns, until_ns))


def suppression(
    windows: Sequence[Window], node: str, node_class: str | None, event: str, event_ns: int
) -> tuple[str, int] | None:
    """Return the id of the first window that suppresses a transition, and the end of all windows joined to it, or None."""
    own = [window for window in windows if event != Event.NEW and window.matches(node, node_class)]
    first = next((window.id for window in own if window.end_ns(event_ns) is not None), None)
    if first is None:
        return None
    until_ns = event_ns
    for _ in range(_MOST_JOINED):
        ends = [end_ns for window in own if (end_ns := window.end_ns(until_ns)) is not None]
        if not ends:
            break
        until_ns = min(max(ends), LAST_NS)
    return first, until_ns
