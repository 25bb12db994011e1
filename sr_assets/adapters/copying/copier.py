"""One writer's work on a batch: look at what the target holds, fetch, publish, stage, account.

Here: the plan of a copy, the copier, its receipt. Not here: Spark (`spark.sink`), which messages are copied (the
stages), what a copy looks like (`domain.messages`), the protocol and its window (`wire`).
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import random
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from sr_assets.adapters import wire
from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.connection_file import open_connection
from sr_assets.adapters.published.history import StagedFiles
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import (
    MESSAGE_ID_HEADER,
    Message,
    Origin,
    header_values,
    header_writer,
    last_origin,
    parse_message_id,
)
from sr_assets.domain.positions import SequenceRange, merge_ranges
from sr_assets.domain.subjects import matcher, printable, target_subject

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: Refusals that belong to one message; every other is the target's state and is tried again.
_ABOUT_THE_MESSAGE: Final = frozenset({wire.MESSAGE_TOO_LARGE, wire.HEADERS_TOO_LARGE, wire.INVALID_SUBJECT})
_REFUSAL_SECONDS: Final = 30.0
_MAX_PARKED: Final = 1000


#: Source stream, replicator, name: whose copies they are.
Identity = tuple[str, str, str]


def is_ours(origin: Origin, headers: bytes, identity: Identity, created_ns: int) -> bool:
    """Tell whether a message in a target is this entry's copy, of the source that was created then if it says so."""
    if (origin.stream, origin.replicator, origin.name) != identity:
        return False
    ids = header_values(headers, MESSAGE_ID_HEADER)
    known = parse_message_id(ids[-1]) if ids else None
    return known is None or known[0] == created_ns


def other_writer(target_stream: str, identity: Identity, sequence: int) -> str:
    """Return what to say of a copy of ours in the target that no intent of this state explains."""
    stream, replicator, name = identity
    return (
        f"target stream {target_stream} holds a copy of {stream} {sequence} that no batch of this site made: another"
        f" replicator called {replicator}/{name} writes there, or this state is an old one; stop it, or run `sr-assets"
        f" recover --stream {name}/{stream}`"
    )


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What a batch's writers are told, each field an option of the sink.

    - `connection`, `stream`, `subjects`: the target: a file made by `write_connection`, its name, what it takes
    - `source_connection`, `source_stream`, `direct`, `filter`: where the messages are; `direct` by direct get
    - `replicator`, `name`, `created_ns`: whose copies these are; the source's created time in unix ns
    - `prefix`, `remove`: how the subject is rewritten
    - `first`, `next`, `since`: the intent: its range of source sequences, and the target's last sequence when it was
      made. What is found in the target behind `since` with our origin is copied already
    - `folder`, `batch`: the folder with this stream's writer locks, and the batch that may write (its file `batch`)
    - `receipt`: the file that the receipt of all tasks is written to once all succeeded
    - `resend`: appended to each `Nats-Msg-Id` as `/r<resend>` unless 0: for a stream that is copied again on purpose
    - `cutoff_ns`: messages stored before (unix ns) are not copied but counted as too old
    - `on_poison`: `park` or `stop`
    - `staging`: the folder for the Parquet rows of what was copied; none without it
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
    receipt: str
    filter: str | None = None
    resend: int = 0
    cutoff_ns: int | None = None
    on_poison: str = "park"
    staging: str | None = None

    @property
    def identity(self) -> Identity:
        """Whose copies these are, as their origin says it."""
        return self.source_stream, self.replicator, self.name

    def encode(self) -> dict[str, str]:
        """Return the options that say this plan: text as it is, everything else as JSON."""
        values = asdict(self)
        return {key: one if isinstance(one, str) else json.dumps(one) for key, one in values.items() if one is not None}

    @classmethod
    def decode(cls, options: Mapping[str, str]) -> Self:
        """Read the options of a write; raises TypeError when one is missing."""
        found = {one.name: options[one.name] for one in fields(cls) if one.name in options}
        text = {one.name for one in fields(cls) if str(one.type).startswith("str")}
        values: dict[str, Any] = {key: one if key in text else json.loads(one) for key, one in found.items()}
        return cls(**{**values, "subjects": tuple(values.get("subjects", ()))})


@dataclass
class Parked:
    """A message the target cannot take, and why."""

    sequence: int
    stored_ns: int
    subject: str
    payload_bytes: int
    reason: str


@dataclass
class Receipt:
    """What one batch's writers did, added up: the only thing a commit is based on.

    `target_sequence` is the highest sequence in the target that was acknowledged or found, `target_holds` the source
    sequence that stands there, `disordered` how many copies stand right behind one of a later source sequence; `copied_ranges` are
    runs of copies: (place in the target, source sequence, how many follow one another in both). `missing` are
    ranges the source does not hold (any more); `found` of the copied ones were in the target already (an earlier
    attempt's); `failure` is one line when the target refuses to go on: then the intent stays open.
    """

    copied: int = 0
    copied_bytes: int = 0
    found: int = 0
    too_old: int = 0
    last_stored_ns: int | None = None
    target_sequence: int = 0
    target_holds: int = 0
    disordered: int = 0
    copied_ranges: list[tuple[int, int, int]] = field(default_factory=list)
    parked: list[Parked] = field(default_factory=list)
    missing: list[tuple[int, int]] = field(default_factory=list)
    failure: str | None = None

    def add(self, other: Receipt) -> None:
        """Add another writer's."""
        self.copied += other.copied
        self.copied_bytes += other.copied_bytes
        self.found += other.found
        self.too_old += other.too_old
        known = [ns for ns in (self.last_stored_ns, other.last_stored_ns) if ns is not None]
        self.last_stored_ns = max(known, default=None)
        if other.target_sequence > self.target_sequence:
            self.target_sequence, self.target_holds = other.target_sequence, other.target_holds
        self.disordered += other.disordered
        self.copied_ranges += other.copied_ranges
        self.parked += other.parked
        self.missing += other.missing
        self.failure = self.failure or other.failure

    def write(self, file: Path) -> None:
        """Write it to a file, at once or not at all."""
        draft = file.with_name(f".{file.name}")
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(file)

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read what `write` left."""
        raw = json.loads(file.read_text())
        parked = [Parked(**one) for one in raw["parked"]]
        runs = {key: [tuple(one) for one in raw[key]] for key in ("copied_ranges", "missing")}
        return cls(**{**raw, **runs, "parked": parked})


class _StopError(Exception):
    """The target refuses to go on; the text is the receipt's failure."""


class Copier:
    """Copies the messages that `rows` name: source sequence → node, None for a sender that is not tracked.

    Publishes in source order with a bounded window and waits for every acknowledgement. Done again it first looks at
    what an earlier attempt left in the target, so nothing is stored twice.
    """

    def __init__(self, plan: CopyPlan, rows: Mapping[int, str | None], partition: int) -> None:
        """Take the plan and this task's share of the rows; nothing is opened before `run`."""
        self._plan = plan
        self._rows = dict(sorted(rows.items()))
        self._receipt = Receipt()
        self._staged = StagedFiles(Path(plan.staging), partition) if plan.staging else None
        # What is on its way or waits to be sent again, by sequence; how often it had to be given another id.
        self._window: dict[int, Message] = {}
        self._resends: dict[int, int] = {}
        self._takes = matcher(plan.subjects)
        self._headers = header_writer(plan.replicator, plan.name, plan.source_stream, plan.created_ns)

    def run(self) -> Receipt:
        """Copy everything and return the receipt.

        Raises WireError when a connection is lost and RunError when another writer was there: then nothing is accounted
        for, and the next attempt finds in the target what this one stored.
        """
        plan = self._plan
        with contextlib.ExitStack() as stack:
            self._source = stack.enter_context(open_connection(plan.source_connection, "sr-assets writer: source"))
            self._target = stack.enter_context(open_connection(plan.connection, "sr-assets writer: target"))
            if self._staged:
                stack.enter_context(self._staged)
            self._found = self._scan_target()
            try:
                self._publish(self._prepare(self._fetch()))
            except _StopError as stop:
                self._receipt.failure = str(stop)
        return self._receipt

    # ------------------------------------------------------------------------------------- what is copied already

    def _scan_target(self) -> set[int]:
        """Read what stands in the target behind the intent: the set of our source sequences there is what is copied."""
        plan = self._plan
        state = self._target.request(f"$JS.API.STREAM.INFO.{plan.stream}", {}).get("state")
        if state is None:
            raise RunError(f"target stream {plan.stream} on {self._target.address} is not there")
        behind = SequenceRange(plan.since + 1, max(plan.since, int(state["last_seq"])) + 1)
        found: set[int] = set()
        for message in itertools.chain.from_iterable(wire.read_headers(self._target, plan.stream, behind)):
            origin = last_origin(message.headers)
            if origin and is_ours(origin, message.headers, plan.identity, plan.created_ns):
                found.add(origin.sequence)
                self._stands_at(message.sequence, origin.sequence)
        outside = [sequence for sequence in found if not plan.first <= sequence < plan.next]
        if outside:
            raise RunError(other_writer(plan.stream, plan.identity, min(outside)))
        return found

    # ---------------------------------------------------------------------------------------- what is to be copied

    def _fetch(self) -> Iterator[list[Message]]:
        """Yield the rows' messages in source order, and note which are not there (any more)."""
        plan, sequences = self._plan, list(self._rows)
        whole = SequenceRange(sequences[0], sequences[-1] + 1)
        contiguous = len(whole) == len(sequences)
        if contiguous:
            lists = wire.read_confirmed(
                self._source, plan.source_stream, whole, filter_subject=plan.filter, direct=plan.direct
            )
        else:
            lists = wire.read_sequences(self._source, plan.source_stream, sequences, direct=plan.direct)
        at = 0
        for messages in lists:
            self._check_batch()
            there = [message.sequence for message in messages]
            after = bisect.bisect(sequences, there[-1], at)
            absent = [] if after - at == len(there) else sorted(set(sequences[at:after]).difference(there))
            at = after
            if absent and not contiguous:
                yield sorted([*messages, *self._ask_leader(absent)], key=lambda message: message.sequence)
            else:
                yield messages
            self._note_missing(absent)
        absent = sequences[at:]
        yield [] if contiguous else self._ask_leader(absent)
        self._note_missing(absent)

    def _ask_leader(self, absent: list[int]) -> list[Message]:
        """Return those of the sequences that the leader has, and leave the others: single gets meet any replica."""
        stream = self._plan.source_stream
        asked = [(sequence, wire.stored_message(self._source, stream, sequence)) for sequence in absent]
        absent[:] = [sequence for sequence, message in asked if message is None]
        return [message for _, message in asked if message is not None]

    def _note_missing(self, absent: list[int]) -> None:
        if not absent:
            return
        copied = [sequence for sequence in absent if sequence in self._found]
        self._receipt.copied += len(copied)
        self._receipt.found += len(copied)
        gone = [SequenceRange(sequence, sequence + 1) for sequence in absent if sequence not in self._found]
        known = [SequenceRange(first, after) for first, after in self._receipt.missing]
        self._receipt.missing = (
            [(one.first, one.next) for one in merge_ranges([*known, *gone])] if gone else self._receipt.missing
        )

    def _check_batch(self) -> None:
        """Stop when a later run has taken over: this task may have outlived the run that started it."""
        current = Path(self._plan.folder, "batch").read_text()
        if current != self._plan.batch:
            raise RunError(f"batch {self._plan.batch} was given up for {current}")

    def _prepare(self, lists: Iterator[list[Message]]) -> Iterator[wire.Outgoing]:
        """Yield what is to be published; stage it, and account for the rest."""
        plan, receipt = self._plan, self._receipt
        for messages in lists:
            staged: list[Message] = []
            for message in messages:
                receipt.last_stored_ns = message.stored_ns
                if plan.cutoff_ns is not None and message.stored_ns < plan.cutoff_ns:
                    receipt.too_old += 1
                    continue
                if message.sequence in self._found:
                    self._count(message)
                    receipt.found += 1
                else:
                    outgoing = self._outgoing(message)
                    if not self._takes(outgoing.subject):
                        subject = printable(outgoing.subject)
                        self._park(message, f"target stream {plan.stream} does not take subject {subject}")
                        continue
                    self._window[message.sequence] = message
                    yield outgoing
                if self._rows[message.sequence] is not None:
                    staged.append(message)
            if self._staged and staged:
                self._staged.add(staged, self._rows)

    # ------------------------------------------------------------------------------------------------ the publishing

    def _publish(self, items: Iterator[wire.Outgoing]) -> None:
        """Publish everything and wait for every ack; what the target refuses for now is tried again for a while."""
        publisher = wire.Publisher(self._target)
        deadline: float | None = None
        pause_seconds = 0.1
        first = True
        again: list[wire.Outgoing] = []
        while True:
            self._check_batch()
            refused: dict[int, wire.Ack] = {}
            duplicates: list[wire.Ack] = []
            for ack in publisher.publish_all(itertools.chain(again, items)):
                if ack.error is not None:
                    refused[ack.sequence] = ack
                elif ack.duplicate:
                    duplicates.append(ack)
                else:
                    self._settle(ack.sequence, ack.target_sequence or 0)
                    if first:
                        reach(Point.PUBLISHING)
                        first = False
                    deadline, pause_seconds = None, 0.1
            # Not before: who asks throws away what else arrives, and that would be acknowledgements.
            for ack in duplicates:
                self._settle_duplicate(ack)
            if not refused and not self._window:
                return
            for sequence, ack in list(refused.items()):
                if ack.error_code in _ABOUT_THE_MESSAGE:
                    self._park(self._window.pop(sequence), f"{ack.error} ({ack.error_code})")
                    del refused[sequence]
            again = [self._outgoing(self._window[sequence]) for sequence in sorted(self._window)]
            if refused:
                deadline = deadline or time.monotonic() + _REFUSAL_SECONDS
                if time.monotonic() > deadline:
                    ack = next(iter(refused.values()))
                    raise _StopError(f"target stream {self._plan.stream} refuses: {ack.error} ({ack.error_code})")
                time.sleep(pause_seconds * random.uniform(0.5, 1.0))  # noqa: S311  jitter, not a secret
                pause_seconds = min(2 * pause_seconds, 5.0)

    def _outgoing(self, message: Message) -> wire.Outgoing:
        """Make the copy: subject, headers and payload as they go out."""
        sequence, stored_ns, subject, headers, payload = message
        resend = self._resends.get(sequence, self._plan.resend)
        subject = target_subject(subject, self._plan.prefix, self._plan.remove)
        return wire.Outgoing(sequence, subject, self._headers(headers, sequence, stored_ns, resend), payload)

    def _settle(self, sequence: int, target_sequence: int) -> None:
        self._count(self._window.pop(sequence))
        self._stands_at(target_sequence, sequence)

    def _stands_at(self, target_sequence: int, sequence: int) -> None:
        receipt = self._receipt
        at, first, length = receipt.copied_ranges[-1] if receipt.copied_ranges else (0, 0, 0)
        if target_sequence == at + length and sequence == first + length:
            receipt.copied_ranges[-1] = (at, first, length + 1)
        else:
            receipt.copied_ranges.append((target_sequence, sequence, 1))
        if target_sequence > receipt.target_sequence:
            receipt.disordered += sequence < receipt.target_holds
            receipt.target_sequence, receipt.target_holds = target_sequence, sequence

    def _count(self, message: Message) -> None:
        self._receipt.copied += 1
        self._receipt.copied_bytes += len(message.payload)

    def _settle_duplicate(self, ack: wire.Ack) -> None:
        """A duplicate is no proof: look the message up; what is not there is sent again under another id."""
        at = ack.target_sequence or 0
        stored = wire.stored_message(self._target, self._plan.stream, at)
        origin = last_origin(stored.headers) if stored else None
        plan = self._plan
        ours = stored and origin and is_ours(origin, stored.headers, plan.identity, plan.created_ns)
        if ours and origin and origin.sequence == ack.sequence:
            if at <= plan.since:
                raise _StopError(other_writer(plan.stream, plan.identity, ack.sequence))
            self._settle(ack.sequence, at)
        else:
            self._resends[ack.sequence] = self._resends.get(ack.sequence, self._plan.resend) + 1

    def _park(self, message: Message, reason: str) -> None:
        if self._plan.on_poison == "stop":
            raise _StopError(
                f"message {message.sequence} cannot be copied: {reason}; on_poison: park goes on without it"
            )
        subject = printable(message.subject)
        self._receipt.parked.append(Parked(message.sequence, message.stored_ns, subject, len(message.payload), reason))
        if len(self._receipt.parked) > _MAX_PARKED:
            raise _StopError(f"more than {_MAX_PARKED} messages of one batch cannot be copied, the last: {reason}")
