"""The content of notifications: JSON for webhooks such as Slack's, with a readable `text`."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from sr_assets.domain.foreign_text import visible

#: More pending events than this become a digest for each site and class, more groups than this one digest.
SINGLE: Final = 10
#: Most events in one digest.
_DIGEST: Final = 1_000
_SHOWN: Final = 10
_PLAIN_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_VERBS: Final = {
    "new": "is new",
    "timeout": "is silent",
    "recover": "is back",
    "expire": "is retired",
    "flapping": "flaps",
    "settled": "has settled",
    "partial": "has a partial outage",
    "dark": "is dark",
    "restored": "reports again",
}


@dataclass(frozen=True, slots=True)
class Event:
    """An event to notify about; a repeated message has the same `id`.

    A failure has a `reason` and no node; an event of a site or of a flapping node has its counts as `reason`. The failure of
    a job that belongs to no site has no stream.
    """

    id: str
    name: str
    stream: str
    event: str
    at: datetime
    detected_at: datetime
    node: str | None = None
    age_seconds: float | None = None
    outage_seconds: float | None = None
    reason: str | None = None
    node_class: str | None = None

    @property
    def place(self) -> str:
        """The site and the stream."""
        return f"{self.name}/{self.stream}" if self.stream else self.name

    @property
    def text(self) -> str:
        where, node, reason = self.place, visible(self.node or ""), visible(self.reason or "")
        if self.event == "failed":
            return f"{where} failed: {reason}"
        if self.reason is not None:
            return f"{node or where} {_VERBS[self.event]}: {reason} ({where}, {self.at:%Y-%m-%d %H:%M:%S} UTC)"
        seconds = {"timeout": self.age_seconds, "recover": self.outage_seconds}.get(self.event)
        lasted = f" after {seconds:.0f} s" if seconds is not None else ""
        return f"{node} {_VERBS[self.event]}{lasted} ({where}, {self.at:%Y-%m-%d %H:%M:%S} UTC)"

    @property
    def body(self) -> dict[str, object]:
        values = {
            "event_id": self.id,
            "event": self.event,
            "name": self.name,
            "stream": self.stream,
            "node": self.node,
            "event_time": self.at.isoformat(),
            "age_seconds": self.age_seconds,
            "outage_seconds": self.outage_seconds,
            "reason": self.reason,
            "class": self.node_class,
        }
        return {key: value for key, value in values.items() if value not in (None, "")}


@dataclass(frozen=True, slots=True)
class Message:
    """A notification: a subject for mail, the JSON with its `text`, and its events."""

    subject: str
    body: dict[str, object]
    events: tuple[Event, ...]

    @property
    def key(self) -> str:
        """Identifies the message: a repetition about other events too is another message."""
        ids = [event.id for event in self.events]
        # The id of another site's event is that site's text.
        if len(ids) == 1 and _PLAIN_ID.fullmatch(ids[0]):
            return ids[0]
        return hashlib.sha256(",".join(ids).encode()).hexdigest()[:32]


def messages(events: Sequence[Event], *, together: bool) -> list[Message]:
    """Return one notification per event, or digests if there are many events or they are sent `together`."""
    if not together and len(events) <= SINGLE:
        return [_single(event) for event in events]
    groups = [events] if together else list(_groups(events).values())
    if len(groups) > SINGLE:
        groups = [events]
    return [
        _single(group[0]) if len(groups) > 1 and len(group) == 1 else _digest(group[first : first + _DIGEST])
        for group in groups
        for first in range(0, len(group), _DIGEST)
    ]


def summary(events: Sequence[Event], since: float) -> Message:
    """Return the one message about all events of a time without messages, which began at `since` (unix seconds)."""
    heading = f"{len(events)} events since {datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M:%S} UTC: "
    return _digest(events, heading, summary=True)


def withheld(message: Message) -> Message:
    """Return a message about the same events that contains nothing of a node: for a receiver that refuses the other."""
    places = ", ".join(sorted({event.place for event in message.events}))
    counts = _totals(message.events)
    text = f"{', '.join(f'{count} {event}' for event, count in counts.items())} ({places}); the receiver refuses the details"
    ids = [event.id for event in message.events if _PLAIN_ID.fullmatch(event.id)]
    return Message(f"sr-assets: {text}"[:200], {"text": text, "counts": counts, "event_ids": ids}, message.events)


def _single(event: Event) -> Message:
    return Message(f"sr-assets: {event.text}", {"text": event.text, **event.body}, (event,))


def _groups(events: Iterable[Event]) -> dict[tuple[str, str | None], list[Event]]:
    """Return the events of each site and class."""
    groups: dict[tuple[str, str | None], list[Event]] = {}
    for event in events:
        groups.setdefault((event.name, event.node_class), []).append(event)
    return groups


def _digest(events: Sequence[Event], prefix: str = "", **more: object) -> Message:
    counts = Counter((event.event, _place(event)) for event in events)
    heading = prefix + ", ".join(f"{count} {event} ({place})" for (event, place), count in counts.most_common())
    lines = [heading, *(event.text for event in events[:_SHOWN])]
    if len(events) > _SHOWN:
        lines.append(f"and {len(events) - _SHOWN} more")
    groups = [
        {"name": name, **({"class": node_class} if node_class else {}), "counts": _totals(group)}
        for (name, node_class), group in _groups(events).items()
    ]
    body = {
        "text": "\n".join(lines),
        "digest": True,
        **more,
        "counts": _totals(events),
        "groups": groups,
        "event_ids": [event.id for event in events],
        "events": [event.body for event in events[:_DIGEST]],
    }
    subject = heading if prefix else f"{len(events)} events: {heading}"
    return Message(f"sr-assets: {subject}"[:200], body, tuple(events))


def _place(event: Event) -> str:
    return f"{event.place}, class {visible(event.node_class)}" if event.node_class else event.place


def _totals(events: Iterable[Event]) -> dict[str, int]:
    return dict(Counter(event.event for event in events))
