"""The records of a site's state: where a stream stands, where its copying stands, and what a batch is about to do.

Here: rows as dataclasses, their fields in the order of the columns. Not here: the statements (`store`), the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Intent:
    """What a batch of copies is about to do, committed before it does anything and done again with the same numbers.

    `first` and `next` bound the source sequences; `available` is the first that the source still held, or of a range
    that spans many holes its first message. `created_ns` and `starts` identify the source and its beginning,
    `target_stream`, `target_created_ns` and `target_sequence` where the target ended. `resend`: what the target lost is
    sent again, nothing is read anew; `waits`: the intent was open when that was noticed, and comes after. `folded`: the
    decisions are in the copy queue; an intent without it was written before the stream was tracked.
    `source_sequence` and `source_ns` are the source's last message when the batch was planned, and when that was
    stored: another stored time there means another source.
    """

    stream: str
    first: int
    available: int
    next: int
    planned_ns: int | None
    cutoff_ns: int | None
    created_ns: int
    target_created_ns: int
    target_sequence: int
    resend: bool = False
    waits: bool = False
    folded: bool = False
    target_stream: str | None = None
    starts: int = 0
    source_sequence: int | None = None
    source_ns: int | None = None


@dataclass(slots=True)
class StreamState:
    """Where the reading of a stream stands: one row of `streams`.

    `epoch_ns` is the watermark at which this state began. `mark_sequence` and `mark_ns` are the last message read and
    when it was stored: another stored time there means another stream. `hole_open`: the last batch ended in a hole, which
    is blind until the next message. `progress_ns` is when the position last moved or
    was caught up, `alive_ns` when the last heartbeat was sent, `alive_due_ns` when the next run is due according to it.
    `starts` counts how often the stream was begun again to be copied anew, `reset_starts` is its value since the source
    was last made again or went back. `policy` is what the stored deadlines were
    computed with; `advisories_stored`: a stream was seen to take the advisories. `forgotten_transition` is the highest
    transition counter of a sender that was forgotten, `ahead_clocks` how many stream infos were not believed.
    """

    stream: str
    created_ns: int
    next_sequence: int
    epoch_ns: int = 0
    watermark_ns: int | None = None
    planned_ns: int | None = None
    last_stored_ns: int | None = None
    mark_sequence: int | None = None
    mark_ns: int | None = None
    hole_open: bool = False
    source_last_sequence: int = 0
    lag_messages: int = 0
    lag_ns: int = 0
    progress_ns: int | None = None
    alive_ns: int | None = None
    alive_due_ns: int | None = None
    started: str | None = None
    starts: int = 0
    reset_starts: int = 0
    forgotten_transition: int = 0
    policy: str | None = None
    advisories_stored: bool = False
    seen_messages: int = 0
    skipped_messages: int = 0
    too_old_messages: int = 0
    no_sender_messages: int = 0
    gap_messages: int = 0
    late_sightings: int = 0
    ahead_clocks: int = 0
    last_error: str | None = None
    last_error_since_ns: int | None = None
    as_of_ns: int | None = None

    @classmethod
    def not_begun(cls, stream: str) -> Self:
        """Return the row of a stream that could not begin: it has no source yet, only an error."""
        return cls(stream, 0, 0)

    @property
    def begun(self) -> bool:
        """Whether there is a position."""
        return self.created_ns != 0

    @property
    def has_read(self) -> bool:
        """Whether the source once had the position: one set by `start_sequence` may be ahead of the source."""
        return bool(self.seen_messages or self.gap_messages)


@dataclass(slots=True)
class CopyState:
    """The progress of a stream's copying: one row of `copying`, which only the copying writes.

    `created_ns` and `starts` identify the source of the copies and its beginning. `target_sequence` is that of our last
    acknowledged copy in the target, `target_holds` its source sequence, `target_checked` up to where the target was checked
    for another writer's copies, `target_looked` how far the first look at the target created at `target_looked_ns` came.
    `lost_messages` were due but deleted from the source before they were copied. Of a feed
    `copied_messages` counts folded advisories, `parked_messages` rejected messages.
    """

    stream: str
    created_ns: int = 0
    starts: int = 0
    target_stream: str | None = None
    target_created_ns: int = 0
    target_sequence: int = 0
    target_holds: int = 0
    target_checked: int = 0
    copied_messages: int = 0
    copied_bytes: int = 0
    parked_messages: int = 0
    lost_messages: int = 0
    error: str | None = None
    error_since_ns: int | None = None
    target_looked: int = 0
    target_looked_ns: int = 0
