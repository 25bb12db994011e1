"""The refill of a stream's Parquet history from the target's copies, on a home with a state but without its history.

The newest message of each node comes first, then the older ones, each backwards from the target's end. Only copies before
the request's position are added: later ones are batches of this home, which write their own rows. Rows that the history
already holds are left out, so an interrupted part can be repeated.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters import times, wire
from sr_assets.adapters.crash_points import Point, reach
from sr_assets.adapters.progress_lines import LongWork
from sr_assets.adapters.published.compaction import describe
from sr_assets.adapters.published.history import StagedFiles, held_sequences, place_refilled, source_mark
from sr_assets.adapters.state.orders import note_refill, read_refill, request_refill
from sr_assets.domain.errors import LeadershipLostError, SrAssetsError
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.senders import inspect
from sr_assets.domain.subjects import source_subject
from sr_assets.stages.replication.recover import portions
from sr_assets.stages.replication.target_copies import claimed_copies
from sr_assets.stages.replication.target_setup import copies_pattern

if TYPE_CHECKING:
    from sr_assets.adapters.nats.stream_info import StreamInfo
    from sr_assets.adapters.state.records import StreamState
    from sr_assets.stages.replication.context import CopyContext
    from sr_assets.stages.tracking.node_snapshots import SnapshotStage

logger = logging.getLogger(__name__)

#: Target sequences of one part, whose copies share files.
_PART_MESSAGES: Final = 5_000
#: Copying waits for at most about this long.
_STEP_SECONDS: Final = 1.0
_CLIENT: Final = "sr-assets refill"
_TARGET_PORTION: Final = 500
_MS: Final = 1_000_000


@dataclass(slots=True)
class _Plan:
    """What is left: copies of source sequences before `before`, at target sequences before `below`.

    `newest`: only the nodes' newest messages, then all from `end` on backwards.
    """

    before: int
    target_created_ns: int
    end: int
    below: int
    newest: bool = True


class HistoryRefill:
    """The refill of one tracked stream during a run: `begin` before the first batch of copies, then `step`.

    Older rows are added until the run's budget ends, and only while no copies wait; the next run continues.
    """

    def __init__(self, context: CopyContext, snapshots: SnapshotStage, budget_seconds: float) -> None:
        self._context, self._stream, self._store = context, context.stream, context.store
        self._index, self._snapshots = context.store.snapshot_index(context.stream.stream), snapshots
        self._staging = context.folder.resolve() / "staging" / context.stream.asset_prefix[1] / "refill"
        self._deadline = times.monotonic() + budget_seconds
        self._begun = False
        self._plan: _Plan | None = None
        self._rows = 0

    def begin(self) -> None:
        """Read or make the plan, once per run: copies that are made from now on have rows of their own."""
        if self._begun:
            return
        self._begun = True
        try:
            self._begin()
        except LeadershipLostError:
            raise
        except SrAssetsError as error:
            self._note_problem(error)

    def _begin(self) -> None:
        if (names := [file.file for file in self._index.files()]) and not self._snapshots.folder.exists():
            with self._store.transaction():
                self._index.forget(names)
            request_refill(self._context.folder, self._stream)
        progress = read_refill(self._context.folder, self._stream)
        state = self._store.load_stream(self._stream.stream)
        if progress is None or state is None or not state.has_position:
            return
        self._snapshots.index_staged()
        target = self._context.clusters.connect(self._stream.target).find_stream(self._stream.target_stream)
        plan = self._read_plan(progress, state, target)
        if plan is None or target is None:
            note_refill(self._context.folder, self._stream, None)
            return
        note_refill(self._context.folder, self._stream, asdict(plan))
        self._snapshots.compaction.adopt_unknown()
        self._prepare(plan, state, target)

    def _read_plan(self, progress: dict[str, Any], state: StreamState, target: StreamInfo | None) -> _Plan | None:
        """Return the plan of an earlier run, or a new one; None if the target holds no copies of this state."""
        copying = self._store.load_copying(self._stream.stream)
        if target is None or copying.target_created_ns != target.created_ns:
            return None
        if not progress:
            end = target.last_sequence + 1
            return _Plan(self._pending(state), target.created_ns, end, end)
        plan = _Plan(**{key: value for key, value in progress.items() if key in _Plan.__dataclass_fields__})
        return plan if plan.target_created_ns == target.created_ns else None

    def _pending(self, state: StreamState) -> int:
        """Return the first source sequence whose copy is not committed yet."""
        name, store = self._stream.stream, self._store
        first, intent = store.copy_queue(name).first(), store.open_intent(name)
        waiting = [*([first.sequence] if first else []), *([intent.first] if intent else [])]
        return min([state.next_sequence, *waiting])

    def _prepare(self, plan: _Plan, state: StreamState, target: StreamInfo) -> None:
        stream, now_ns = self._stream, self._context.clock.now_ns()
        self._source = self._context.clusters.connect(stream.source).stream_info(stream.stream)
        self._state, self._target, self._plan = state, target, plan
        self._oldest_ms = _midnight_ms(self._snapshots.compaction.oldest_date(now_ns))
        # The stored time of the newest copied message of each node without a row.
        self._wanted = self._index.missing()
        total = plan.end - max(1, target.first_sequence)
        self._progress = LongWork(f"{stream.label}: refilling the history from {stream.target_stream}", total)
        if self._wanted:
            count = len(self._wanted)
            logger.info("%s: reading the newest messages of %d nodes from the target", stream.label, count)

    @staticmethod
    def _mark(state: StreamState) -> str:
        return source_mark(state.created_ns, state.reset_starts)

    def step(self, *, busy: bool) -> bool:
        """Do about a second of the work; return whether some of it remains for this run."""
        ends = times.monotonic() + _STEP_SECONDS
        try:
            while self._plan is not None and (self._plan.newest or not (busy or times.monotonic() > self._deadline)):
                self._do_part(self._plan)
                if times.monotonic() > ends:
                    return self._plan is not None
        except LeadershipLostError:
            raise
        except SrAssetsError as error:
            self._note_problem(error)
        return False

    def _note_problem(self, error: SrAssetsError) -> None:
        logger.warning("%s: the refill of the history stops until the next run: %s", self._stream.label, error)
        self._plan = None

    def _do_part(self, plan: _Plan) -> None:
        first = max(1, self._target.first_sequence)
        part = SequenceRange(max(first, plan.below - _PART_MESSAGES), max(first, plan.below))
        if len(part) and (self._wanted or not plan.newest):
            self._refill(part, plan)
        plan.below = part.first
        if plan.newest and (plan.below <= first or not self._wanted):
            plan.newest, plan.below = False, plan.end
        elif plan.below <= first:
            logger.info("%s: the history is complete again, with %d rows", self._stream.label, self._rows)
            note_refill(self._context.folder, self._stream, None)
            self._plan = None
            return
        note_refill(self._context.folder, self._stream, asdict(plan))
        if not plan.newest:
            self._progress.reached(plan.end - plan.below)

    def _refill(self, part: SequenceRange, plan: _Plan) -> None:
        """Add the rows of a part of the target that the history lacks."""
        stream, mark = self._stream, self._mark(self._state)
        shutil.rmtree(self._staging, ignore_errors=True)
        with wire.Connection(stream.target, _CLIENT) as target, wire.Connection(stream.source, _CLIENT) as source:
            copies = self._missing(self._copies(target, part, plan), mark)
            if not copies:
                return
            covered = SequenceRange(min(copies), max(copies) + 1)
            with StagedFiles(self._staging, 0, stream.max_metadata) as staged:
                left = dict(copies)
                for messages in self._from_source(source, left):
                    self._stage(staged, messages, plan, precision_ns=1)
                for messages in self._from_target(target, left):
                    self._stage(staged, messages, plan, precision_ns=_MS)
        files = place_refilled(self._staging, self._snapshots.folder, covered, mark)
        reach(Point.REFILLING)
        with self._store.transaction():
            self._index.add_earlier([*map(describe, files)])

    def _copies(self, target: wire.Connection, part: SequenceRange, plan: _Plan) -> dict[int, tuple[int, int]]:
        """Return this source's copies in a part: source sequence → target sequence, original's stored time in ms."""
        stream, state, copies = self._stream, self._state, {}
        newest_ms = {stored_ns // _MS for stored_ns in self._wanted.values()} if plan.newest else None
        pattern = copies_pattern(stream, self._target)
        for message, copy in claimed_copies(target, stream, part, pattern, state.created_ns):
            if copy.sequence >= plan.before or copy.is_before(state.reset_starts):
                continue
            if copy.stored_ms >= self._oldest_ms and (newest_ms is None or copy.stored_ms in newest_ms):
                copies[copy.sequence] = message.sequence, copy.stored_ms
        return copies

    def _missing(self, copies: dict[int, tuple[int, int]], mark: str) -> dict[int, tuple[int, int]]:
        """Return the copies whose messages are in no file of the history."""
        if not copies:
            return copies
        held = held_sequences(self._snapshots.folder, mark, SequenceRange(min(copies), max(copies) + 1))
        return {sequence: place for sequence, place in copies.items() if sequence not in held}

    def _from_source(self, source: wire.Connection, left: dict[int, tuple[int, int]]) -> Iterator[list[Message]]:
        """Yield the copied messages that the source still holds, and remove them from `left`."""
        held = [sequence for sequence in sorted(left) if sequence >= self._source.first_sequence]
        direct = self._source.supports_batched_direct_get
        for messages in wire.read_sequences(source, self._stream.stream, held, direct=direct):
            same = [message for message in messages if message.stored_ns // _MS == left[message.sequence][1]]
            for message in same:
                del left[message.sequence]
            yield same

    def _from_target(self, target: wire.Connection, left: dict[int, tuple[int, int]]) -> Iterator[list[Message]]:
        """Yield the copied messages from the target, the newest first, with their originals' times in ms."""
        stream, direct = self._stream, self._target.supports_batched_direct_get
        origins = {at: (sequence, stored_ms * _MS) for sequence, (at, stored_ms) in left.items()}
        for portion in portions(sorted(origins, reverse=True), _TARGET_PORTION):
            lists = wire.read_sequences(target, stream.target_stream, sorted(portion), direct=direct)
            yield [
                message._replace(
                    sequence=origins[message.sequence][0],
                    stored_ns=origins[message.sequence][1],
                    subject=source_subject(message.subject, stream.prefix),
                )
                for message in reversed([*itertools.chain.from_iterable(lists)])
            ]

    def _stage(self, staged: StagedFiles, messages: list[Message], plan: _Plan, precision_ns: int) -> None:
        """Stage the rows of tracked senders, in the newest phase only the nodes' newest messages."""
        assert self._stream.extractor is not None  # settings require it of a tracked stream
        nodes: dict[int, str | None] = {}
        chosen: list[Message] = []
        for message in messages:
            node, _ = inspect(self._stream.extractor, None, message.subject, message.headers, message.payload)
            newest_ns = None if node is None else self._wanted.get(node)
            is_newest = newest_ns is not None and newest_ns - newest_ns % precision_ns == message.stored_ns
            if node is None or (plan.newest and not is_newest):
                continue
            nodes[message.sequence] = node
            chosen.append(message if newest_ns is None or not is_newest else message._replace(stored_ns=newest_ns))
            if is_newest:
                del self._wanted[node]
        self._rows += len(chosen)
        staged.add(chosen, nodes)


def _midnight_ms(date: str | None) -> int:
    """Return the start of an ISO date in unix ms, or 0."""
    return int(datetime.fromisoformat(date).replace(tzinfo=UTC).timestamp()) * 1000 if date else 0
