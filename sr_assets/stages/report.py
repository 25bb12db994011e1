"""A run's report on one stream or feed, and the stages that a run can select.

The stages fill the report; checks, materialisations and the command line read it.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from sr_assets.adapters import times
from sr_assets.adapters.state.records import CopyState, StreamState
from sr_assets.settings import Entry, FeedSettings


class Stage(StrEnum):
    """The stages of a stream that can be materialised, in flow order; a feed has only `advisory_feed`."""

    NODE_STATE = "node_state"
    NODE_ADVISORIES = "node_advisories"
    REPLICA = "replica"
    NODE_SNAPSHOTS = "node_snapshots"
    ADVISORY_FEED = "advisory_feed"


def stages_of(entry: Entry) -> tuple[Stage, ...]:
    """Return the stages of a stream or a feed, in the order in which their results are recorded."""
    if isinstance(entry, FeedSettings):
        return (Stage.ADVISORY_FEED,)
    tracked = (Stage.NODE_STATE, Stage.REPLICA, Stage.NODE_SNAPSHOTS, Stage.NODE_ADVISORIES)
    return tracked if entry.tracked else (Stage.REPLICA,)


@dataclass(slots=True)
class StreamReport:
    """A run's work for one stream or feed.

    `first` and `next` are the sequences read. `failures` has a line for each work loop that gave up, `failed` the
    stages of these loops; `lost`: the state is. For a feed, `copied` counts folded and `parked` rejected messages.

    `read_by` and `copied_by` count the messages that were read and copied by the counter of their engine (`SPARK_MESSAGES`,
    `LOCAL_MESSAGES`).

    `state` and `copying` are the rows as last committed, or with the watermark that the end of the run commits.
    `alive_at` is the time of the last heartbeat, `began_at` the start of the run (monotonic seconds); `alive_ns`,
    `alive_due_ns`, `advisories_stored` and `epoch_ns`, the latest one of the stored advisories, go into the state.
    """

    stream: Entry
    first: int | None = None
    next: int | None = None
    batches: int = 0
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    copied: int = 0
    copied_bytes: int = 0
    read_by: Counter[str] = field(default_factory=Counter)
    copied_by: Counter[str] = field(default_factory=Counter)
    found: int = 0
    batched: int = 0
    parked: int = 0
    gap_messages: int = 0
    gap_rows: int = 0
    disordered: int = 0
    resent: int = 0
    swept: int = 0
    events: Counter[str] = field(default_factory=Counter)
    published: int = 0
    waiting: int = 0
    queued: int = 0
    paused: bool = False
    snapshots: int = 0
    began_at: float = field(default_factory=times.monotonic)
    alive_at: float | None = None
    alive_ns: int | None = None
    alive_due_ns: int | None = None
    undeliverable: str | None = None
    undeliverable_event: str | None = None
    wrong_clock: str | None = None
    target_drift: list[str] = field(default_factory=list)
    advisories_stored: bool = False
    epoch_ns: int = 0
    failures: list[str] = field(default_factory=list)
    failed: set[Stage] = field(default_factory=set)
    misconfigured: bool = False
    lost: bool = False
    state: StreamState | None = None
    copying: CopyState | None = None

    def take_published(self, state: StreamState) -> None:
        """Note in the state what is known of the stored advisories: only the reading thread writes its row."""
        state.advisories_stored |= self.advisories_stored
        state.epoch_ns = max(state.epoch_ns, self.epoch_ns)

    @property
    def failure(self) -> str | None:
        """The failure in one line, or None."""
        return "; ".join(dict.fromkeys(self.failures)) or None

    @property
    def lag_messages(self) -> int:
        """Unread messages of the source after the last commit."""
        return self.state.lag_messages if self.state else 0

    @property
    def messages(self) -> int:
        """Number of source messages that were read and decided."""
        return sum(self.reasons.values())
