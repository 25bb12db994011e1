"""The content of notifications: JSON for webhooks such as Slack's, with a readable `text`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

#: More pending events than this become one digest.
SINGLE: Final = 10
#: Most events in one digest.
_DIGEST: Final = 1_000
_SHOWN: Final = 10
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

    @property
    def text(self) -> str:
        """The event as one line."""
        where = f"{self.name}/{self.stream}" if self.stream else self.name
        if self.event == "failed":
            return f"{where} failed: {self.reason}"
        if self.reason is not None:
            return (
                f"{self.node or where} {_VERBS[self.event]}: {self.reason} ({where}, {self.at:%Y-%m-%d %H:%M:%S} UTC)"
            )
        seconds = {"timeout": self.age_seconds, "recover": self.outage_seconds}.get(self.event)
        lasted = f" after {seconds:.0f} s" if seconds is not None else ""
        return f"{self.node} {_VERBS[self.event]}{lasted} ({where}, {self.at:%Y-%m-%d %H:%M:%S} UTC)"

    @property
    def body(self) -> dict[str, object]:
        """The event as JSON."""
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
        }
        return {key: value for key, value in values.items() if value not in (None, "")}


@dataclass(frozen=True, slots=True)
class Message:
    """A notification: a subject for mail, the JSON with its `text`, and its events."""

    subject: str
    body: dict[str, object]
    events: tuple[Event, ...]


def messages(events: Sequence[Event], *, together: bool) -> list[Message]:
    """Return one notification per event, or digests if there are many events or they are sent `together`."""
    if not together and len(events) <= SINGLE:
        return [Message(f"sr-assets: {event.text}", {"text": event.text, **event.body}, (event,)) for event in events]
    return [_digest(events[first : first + _DIGEST]) for first in range(0, len(events), _DIGEST)]


def _digest(events: Sequence[Event]) -> Message:
    counts = Counter((event.event, f"{event.name}/{event.stream}") for event in events)
    heading = ", ".join(f"{count} {event} ({where})" for (event, where), count in counts.most_common())
    lines = [heading, *(event.text for event in events[:_SHOWN])]
    if len(events) > _SHOWN:
        lines.append(f"and {len(events) - _SHOWN} more")
    totals = Counter(event.event for event in events)
    body = {
        "text": "\n".join(lines),
        "digest": True,
        "counts": dict(totals),
        "event_ids": [event.id for event in events],
        "events": [event.body for event in events],
    }
    return Message(f"sr-assets: {len(events)} events: {heading}"[:200], body, tuple(events))
