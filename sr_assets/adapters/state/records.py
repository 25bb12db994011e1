"""Records of a site's state, their fields in the order of the columns: intents, and reading and copying progress."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Intent:
    """Plan of a batch of copies: committed before the batch starts, and repeated with the same numbers after a crash.

    `first` and `next` bound the source sequences. `available` is the first sequence that the source still held, or the
    first message of a range with many holes. `created_ns` and `starts` identify the source and its restart;
    `target_stream`, `target_created_ns` and `target_sequence` identify the end of the target.

    With `resend` the batch sends messages again that the target lost, and reads nothing new. With `waits` the intent
    was already open when the loss was noticed, and runs afterwards. With `folded` the decisions are in the copy queue;
    an intent without it was written before the stream was tracked.

    `source_sequence` and `source_ns` are the source's last message at planning and its stored time: another time at
    that sequence means another source.

    `adopted_first` and `adopted_next` bound the target sequences of the batch's copies that a later state of this site
    has made: this state is an older one.

    `begun` counts the attempts, the present one included, that each ended with its process. After several the batch is made
    in parts of `part` messages (0: whole); `first` then moves with each part, and `whole_first` is where it was planned.
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
    adopted_first: int = 0
    adopted_next: int = 0
    whole_first: int = 0
    part: int = 0
    begun: int = 1

    @property
    def whole(self) -> tuple[int, int]:
        """The planned range: an earlier attempt may have copied any message of it after `target_sequence`."""
        return self.whole_first or self.first, self.next


@dataclass(slots=True)
class StreamState:
    """Reading progress of a stream: one row of `streams`.

    `epoch_ns` is the watermark at the start of this state. `mark_sequence` and `mark_ns` are the last message read and
    its stored time: another time at that sequence means another stream. `hole_open` means that the last batch ended in
    a hole, which is blind until the next message.

    `progress_ns` is the time when the position last moved or was caught up, `alive_ns` the time of the last heartbeat,
    `alive_due_ns` the time of the next run that it announced. `starts` counts how often copying was restarted;
    `reset_starts` is its value at the last recreation or rollback of the source.

    `policy` is the policy of the stored deadlines. `advisories_stored` means that a stream for the advisories was seen.
    `forgotten_transition` is the highest transition counter of a forgotten sender, `ahead_clocks` the number of stream
    infos that were ignored because of a clock ahead.
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
    def without_position(cls, stream: str) -> Self:
        """Return the row of a stream that could not start: it has an error and no source yet."""
        return cls(stream, 0, 0)

    @property
    def has_position(self) -> bool:
        """Whether there is a position."""
        return self.created_ns != 0

    @property
    def has_read(self) -> bool:
        """Whether the source ever held the position; one from `start_sequence` may be ahead of the source."""
        return bool(self.seen_messages or self.gap_messages)


@dataclass(slots=True)
class CopyState:
    """Copying progress of a stream: one row of `copying`, written by the copying alone.

    `created_ns` and `starts` identify the source of the copies and its restart. `target_sequence` is the target
    sequence of our last acknowledged copy, `target_holds` its source sequence. `target_checked` is the end of the
    target range that was checked for another writer's copies. `target_adopted` is the first target sequence that may hold
    copies of a later state that no batch has counted yet, or 0. `target_looked` is how far the first scan came of the
    target created at `target_looked_ns`.

    `lost_messages` were due, but the source deleted them before they were copied. For a feed, `copied_messages` counts
    folded advisories and `parked_messages` rejected messages.
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
    target_adopted: int = 0
