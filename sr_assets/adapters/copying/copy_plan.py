"""The plan of a batch's copies: what its writers get, here or in tasks."""

from dataclasses import dataclass
from pathlib import Path

from sr_assets.adapters.state.lease import Guard, guard_of
from sr_assets.domain.errors import RunError
from sr_assets.domain.provenance import Identity
from sr_assets.domain.registration import METADATA_BYTES


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The input of a batch's writers.

    - `connection`, `stream`, `subjects`: the target: its connection file (`write_connection`), name and subjects
    - `source_connection`, `source_stream`, `direct`, `filter`: the source; with `direct` it is read by direct get
    - `replicator`, `name`, `created_ns`: the identity of the copies; the source's created time in unix ns
    - `prefix`, `remove`: how the subject is rewritten
    - `first`, `next`, `since`: the intent: its range of source sequences, and the target's last sequence when it was
      committed. A source message with our copy after `since` is already copied
    - `whole`: the batch's range; the copies of its other parts are ignored
    - `adopted`: the target sequences of the range's copies that a later state of this site has made, half-open
    - `folder`, `batch`: the folder with this stream's writer locks, and the batch that may write (its file `batch`)
    - `resend`: appended to each `Nats-Msg-Id` as `/r<resend>` unless 0: for a stream that is recopied on purpose
    - `source_sequence`, `source_ns`: a message of the source at or after the range's end, and its stored time. If the
      source now has another message there, or ends before it, it was recreated or rolled back. None disables the check
    - `cutoff_ns`: messages stored before this time (unix ns) are not copied but counted as too old
    - `on_poison`: `park` or `stop`
    - `staging`: the folder for the Parquet rows of the copies; None disables staging. `metadata_bytes`: the largest metadata
      of a row
    - `leases`: the folders with the site's leases (of an election, of locks), on this machine. `vanished_ms`: how long sent
      copies may stay unacknowledged by the target before the kernel drops them
    - `lanes`: the filters of the source's partitions; a message that matches none is an error. With `by_lane` a row is the
      number of a lane, and its writer copies all messages of the range that match the lane's filter
    - `batched`: whether to publish in fast-ingest batches where the target accepts them
    - `fence`: on a cluster, the target's consumer that permits the batch's writers to write (`fence`)
    """

    connection: str
    stream: str
    subjects: tuple[str, ...]
    source_connection: str
    source_stream: str
    direct: bool
    replicator: str
    name: str
    created_ns: int
    prefix: str
    remove: str
    first: int
    next: int
    since: int
    folder: str
    batch: str
    whole: tuple[int, int] = (0, 0)
    adopted: tuple[int, int] = (0, 0)
    filter: str | None = None
    resend: int = 0
    source_sequence: int | None = None
    source_ns: int | None = None
    cutoff_ns: int | None = None
    on_poison: str = "park"
    staging: str | None = None
    metadata_bytes: int = METADATA_BYTES
    fence: str | None = None
    leases: tuple[str, ...] = ()
    vanished_ms: int | None = None
    batched: bool = False
    lanes: tuple[str, ...] = ()
    by_lane: bool = False

    @property
    def identity(self) -> Identity:
        return Identity(self.source_stream, self.replicator, self.name)

    @property
    def guard(self) -> Guard:
        """The guard of the copies: it raises LeadershipLostError if another member may lead the site."""
        guards = [guard_of(Path(folder)) for folder in self.leases]

        def ensure() -> None:
            for guard in guards:
                guard()

        return ensure

    def check_batch(self) -> None:
        """Raise RunError if a later run has started another batch: a task may outlive its run."""
        current = Path(self.folder, "batch").read_text()
        if current != self.batch:
            raise RunError(f"batch {self.batch} was replaced by {current}")
