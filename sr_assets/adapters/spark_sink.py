"""The Spark sink `jetstream`: references to messages of a source → copies in a target, acknowledged, staged and
accounted for.

Here: one writer task, its lock, its receipt. Not here: which messages are copied (the stages), what a copy looks like
(`domain.messages`), the protocol and its window (`wire`). Payloads never pass through the JVM: a row names a sequence,
the task fetches that message from the source and publishes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import random
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from sr_assets.adapters import wire
from sr_assets.adapters.spark_source import open_connection, printable
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import (
    MESSAGE_ID_HEADER,
    Message,
    Origin,
    header_values,
    last_origin,
    message_id,
    outgoing_headers,
    parse_message_id,
)
from sr_assets.domain.positions import SequenceRange, merge_ranges
from sr_assets.domain.subjects import matches, target_subject

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import pyarrow as pa

#: Refusals that belong to one message; every other is the target's state and is tried again.
_ABOUT_THE_MESSAGE = frozenset({wire.MESSAGE_TOO_LARGE, wire.HEADERS_TOO_LARGE, wire.INVALID_SUBJECT})
_LOCK_SECONDS = 60.0
_REFUSAL_SECONDS = 30.0
_MAX_PARKED = 1000
_SECOND_NS = 1_000_000_000


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
    sequence that stands there, `disordered` how many copies stand behind one of a later source sequence. `missing`
    are ranges the source does not hold (any more); `found` of the copied ones were in the target already (an earlier
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
    parked: list[Parked] = field(default_factory=list)
    missing: list[tuple[int, int]] = field(default_factory=list)
    failure: str | None = None

    def add(self, other: Receipt) -> None:
        """Add another writer's."""
        self.copied += other.copied
        self.copied_bytes += other.copied_bytes
        self.found += other.found
        self.too_old += other.too_old
        self.last_stored_ns = max(
            (ns for ns in (self.last_stored_ns, other.last_stored_ns) if ns is not None), default=None
        )
        if other.target_sequence > self.target_sequence:
            self.target_sequence, self.target_holds = other.target_sequence, other.target_holds
        self.disordered += other.disordered
        self.parked += other.parked
        self.missing += other.missing
        self.failure = self.failure or other.failure


def read_receipt(file: Path) -> Receipt:
    """Read what the last write left in `file`."""
    raw = json.loads(file.read_text())
    parked = [Parked(**one) for one in raw.pop("parked")]
    return Receipt(**{**raw, "parked": parked, "missing": [tuple(one) for one in raw["missing"]]})


@dataclass
class ReceiptMessage(WriterCommitMessage):
    """A task's receipt on its way to the driver."""

    receipt: Receipt


class JetStreamWriter(DataSourceArrowWriter):
    """Copies the messages that its rows name; one task is one writer, in source order.

    Rows: `sequence` (long), and `node` (string, null for senders that are not tracked) when `staging` is set.

    Options:

    - `connection`, `stream`: the target (a file made by `write_connection`; the stream's name), `subjects`: its
      subjects as a JSON list
    - `source_connection`, `source_stream`, `direct`: where the messages are
    - `replicator`, `name`, `created_ns`: whose copies these are; the source's created time in unix ns
    - `prefix`, `remove`: how the subject is rewritten
    - `first`, `next`, `since`: the intent: its range of source sequences, and the target's last sequence when it was
      made. What is found in the target behind `since` with our origin is copied already
    - `resend`: appended to each `Nats-Msg-Id` as `/r<resend>` unless 0: for a stream that is copied again on purpose
    - `cutoff_ns`: messages stored before are not copied but counted as too old
    - `on_poison`: `park` or `stop`
    - `folder`, `batch`: the folder with this stream's writer locks, and the batch that is allowed to write (its file
      `batch`)
    - `staging`: the folder for the Parquet rows of what was copied, `<staging>/date=…/<partition>.parquet`
    - `receipt`: the file that the receipt of all tasks is written to once all succeeded

    A task that runs again first looks at what an earlier attempt left in the target, so nothing is stored twice.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        """Keep the options; nothing is opened before a task runs."""
        self._options = dict(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> ReceiptMessage:
        """Copy one partition's messages and return its receipt. Raises WireError when a connection is lost.

        Spark tries again.
        """
        from pyspark import TaskContext

        rows: dict[int, str | None] = {}
        for batch in iterator:
            nodes = batch.column("node").to_pylist() if "node" in batch.schema.names else itertools.repeat(None)
            rows.update(zip(batch.column("sequence").to_pylist(), nodes, strict=False))
        context = TaskContext.get()
        partition = context.partitionId() if context else 0
        if not rows:
            return ReceiptMessage(Receipt())
        with _writer_lock(Path(self._options["folder"]) / f"writer-{partition}.lock"):
            return ReceiptMessage(_Copy(self._options, dict(sorted(rows.items())), partition).run())

    def commit(self, messages: list[ReceiptMessage | None]) -> None:  # type: ignore[override]
        """Write the receipt of all tasks, at once or not at all."""
        total = Receipt()
        for message in messages:
            if message is not None:
                total.add(message.receipt)
        file = Path(self._options["receipt"])
        draft = file.with_name(f".{file.name}")
        draft.write_text(json.dumps(asdict(total)))
        draft.replace(file)


@contextlib.contextmanager
def _writer_lock(file: Path) -> Iterator[None]:
    """Hold a writer's lock, which the kernel frees however its holder ends; raises RunError after a minute."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+") as handle:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunError(f"an earlier writer still holds {file}; restart the Spark engine") from None
                time.sleep(0.05)
        yield


class _Copy:
    """One task's work: fetch, publish, stage, account."""

    def __init__(self, options: dict[str, str], rows: dict[int, str | None], partition: int) -> None:
        self._options = options
        self._rows = rows
        self._receipt = Receipt()
        self._subjects: list[str] = json.loads(options["subjects"])
        self._cutoff_ns = int(options["cutoff_ns"]) if "cutoff_ns" in options else None
        self._staging = _Staging(Path(options["staging"]), partition) if "staging" in options else None
        self._window: dict[int, wire.Outgoing] = {}
        self._created_ns = int(options["created_ns"])
        self._since = int(options["since"])
        self._resend = int(options.get("resend", 0))

    def run(self) -> Receipt:
        options = self._options
        with contextlib.ExitStack() as stack:
            self._source = stack.enter_context(
                open_connection(options["source_connection"], "sr-assets writer: source")
            )
            self._target = stack.enter_context(open_connection(options["connection"], "sr-assets writer: target"))
            if self._staging:
                stack.enter_context(self._staging)
            self._found = self._scan_target()
            try:
                self._publish(self._fetch())
            except _Stop as stop:
                self._receipt.failure = str(stop)
        return self._receipt

    def _scan_target(self) -> set[int]:
        """Read what stands in the target behind the intent: the set of our source sequences there is what is copied."""
        options, stream = self._options, self._options["stream"]
        state = self._target.request(f"$JS.API.STREAM.INFO.{stream}", {}).get("state")
        if state is None:
            raise RunError(f"target stream {stream} on {self._target.address} is not there")
        last = int(state["last_seq"])
        found: set[int] = set()
        if last <= self._since:
            return found
        for messages in wire.read_headers(self._target, stream, SequenceRange(self._since + 1, last + 1)):
            for message in messages:
                origin = last_origin(message.headers)
                if origin and self._is_ours(origin, message.headers):
                    found.add(origin.sequence)
                    self._stands_at(message.sequence, origin.sequence)
        outside = [one for one in found if not int(options["first"]) <= one < int(options["next"])]
        if outside:
            raise RunError(
                f"target stream {stream} holds copies of {options['source_stream']} {min(outside)} that no batch of"
                f" this site made: another replicator called {options['replicator']}/{options['name']} writes there, or"
                " this state is an old one; stop it, or run `sr-assets recover --stream"
                f" {options['name']}/{options['source_stream']}`"
            )
        return found

    def _is_ours(self, origin: Origin, headers: bytes) -> bool:
        options = self._options
        if (origin.stream, origin.replicator, origin.name) != (
            options["source_stream"],
            options["replicator"],
            options["name"],
        ):
            return False
        ids = header_values(headers, MESSAGE_ID_HEADER)
        known = parse_message_id(ids[-1]) if ids else None
        return known is None or known[0] == self._created_ns

    def _fetch(self) -> Iterator[wire.Outgoing]:
        """Yield what is to be published, in source order; account for what is not."""
        stream, direct = self._options["source_stream"], self._options["direct"] == "true"
        absent = iter(self._rows)
        missing: list[SequenceRange] = []

        def skipped_until(sequence: int | None) -> Iterator[Message]:
            # Any replica may have answered: what it did not have is missing only when the leader says so.
            for wanted in absent:
                if wanted == sequence:
                    return
                message = wire.stored_message(self._source, stream, wanted) if self._is_exact(wanted) else None
                if message is not None:
                    yield message
                elif wanted in self._found:
                    self._receipt.copied += 1
                    self._receipt.found += 1
                else:
                    missing.append(SequenceRange(wanted, wanted + 1))

        for messages in self._read(stream, direct=direct):
            self._check_batch()
            wanted: list[Message] = []
            for message in messages:
                wanted.extend(skipped_until(message.sequence))
                wanted.append(message)
            yield from self._prepare(wanted)
        yield from self._prepare(list(skipped_until(None)))
        self._receipt.missing = [(one.first, one.next) for one in merge_ranges(missing)]

    def _is_exact(self, _sequence: int) -> bool:
        # A whole range was read until the leader confirmed its end; single gets may have met a replica that lags.
        return not self._whole

    def _read(self, stream: str, *, direct: bool) -> Iterator[list[Message]]:
        first, last = next(iter(self._rows)), next(reversed(self._rows))
        self._whole = last - first + 1 == len(self._rows)
        if self._whole:
            whole = SequenceRange(first, last + 1)
            return wire.read_confirmed(
                self._source, stream, whole, filter_subject=self._options.get("filter"), direct=direct
            )
        return wire.read_sequences(self._source, stream, self._rows, direct=direct)

    def _check_batch(self) -> None:
        """Stop when a later run has taken over: this task may have outlived the run that started it."""
        current = (Path(self._options["folder"]) / "batch").read_text()
        if current != self._options["batch"]:
            raise RunError(f"batch {self._options['batch']} was given up for {current}")

    def _prepare(self, messages: list[Message]) -> Iterator[wire.Outgoing]:
        staged: list[Message] = []
        for message in messages:
            self._receipt.last_stored_ns = message.stored_ns
            if self._cutoff_ns is not None and message.stored_ns < self._cutoff_ns:
                self._receipt.too_old += 1
                continue
            if self._rows[message.sequence] is not None:
                staged.append(message)
            if message.sequence in self._found:
                self._count(len(message.payload))
                self._receipt.found += 1
                continue
            subject = target_subject(message.subject, self._options["prefix"], self._options["remove"])
            if not any(matches(pattern, subject) for pattern in self._subjects):
                self._park(
                    message, f"target stream {self._options['stream']} does not take subject {printable(subject)}"
                )
                continue
            yield self._outgoing(message, subject)
        if self._staging:
            self._staging.add(staged, self._rows)

    def _outgoing(self, message: Message, subject: str) -> wire.Outgoing:
        options = self._options
        identity = (options["source_stream"], message.sequence, options["replicator"], options["name"])
        origin = Origin(*identity, message.stored_ns // 1_000_000)
        own_id = message_id(
            options["replicator"],
            options["name"],
            options["source_stream"],
            self._created_ns,
            message.sequence,
            self._resend,
        )
        outgoing = wire.Outgoing(
            message.sequence, subject, outgoing_headers(message.headers, origin, own_id), message.payload
        )
        self._window[message.sequence] = outgoing
        return outgoing

    def _publish(self, items: Iterator[wire.Outgoing]) -> None:
        """Publish everything, waiting for every ack.

        Refusals that are not about a message are tried again for half a minute.
        """
        publisher = wire.Publisher(self._target)
        deadline: float | None = None
        pause = 0.1
        again: list[wire.Outgoing] = []
        while True:
            self._check_batch()
            refused: dict[int, wire.Ack] = {}
            for ack in publisher.publish_all(itertools.chain(again, items)):
                if ack.error is not None:
                    refused[ack.sequence] = ack
                elif ack.duplicate:
                    self._settle_duplicate(ack)
                else:
                    self._settle(ack.sequence, ack.target_sequence or 0)
                    deadline, pause = None, 0.1
            if not refused and not self._window:
                return
            self._park_refused(refused)
            again = [self._window[sequence] for sequence in sorted(self._window)]
            others = [ack for ack in refused.values() if ack.error_code not in _ABOUT_THE_MESSAGE]
            if others:
                deadline = deadline or time.monotonic() + _REFUSAL_SECONDS
                if time.monotonic() > deadline:
                    raise _Stop(
                        f"target stream {self._options['stream']} refuses: {others[0].error} ({others[0].error_code})"
                    )
                time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
                pause = min(2 * pause, 5.0)

    def _settle(self, sequence: int, target_sequence: int) -> None:
        self._count(len(self._window.pop(sequence).payload))
        self._stands_at(target_sequence, sequence)

    def _stands_at(self, target_sequence: int, sequence: int) -> None:
        receipt = self._receipt
        if target_sequence > receipt.target_sequence:
            receipt.disordered += sequence < receipt.target_holds
            receipt.target_sequence, receipt.target_holds = target_sequence, sequence

    def _count(self, payload_bytes: int) -> None:
        self._receipt.copied += 1
        self._receipt.copied_bytes += payload_bytes

    def _settle_duplicate(self, ack: wire.Ack) -> None:
        """A duplicate is no proof: look the message up; what is not there is sent again under another id."""
        stream, at = self._options["stream"], ack.target_sequence or 0
        stored = wire.stored_message(self._target, stream, at)
        origin = last_origin(stored.headers) if stored else None
        if stored and origin and origin.sequence == ack.sequence and self._is_ours(origin, stored.headers):
            if at <= self._since:
                raise _Stop(
                    f"target stream {stream} already holds {self._options['source_stream']} {ack.sequence} at {at},"
                    " from before this batch: another replicator called"
                    f" {self._options['replicator']}/{self._options['name']} writes there, or this state is an old one"
                )
            self._settle(ack.sequence, at)
            return
        again = self._window[ack.sequence]
        resend = int(again.headers.rpartition(b"/r")[2].strip() or 0) if b"/r" in again.headers[-16:] else 0
        base, _, _ = again.headers.rpartition(b"/r") if resend else (again.headers[:-4], b"", b"")
        headers = b"%b/r%d\r\n\r\n" % (base, resend + 1)
        self._window[ack.sequence] = wire.Outgoing(again.sequence, again.subject, headers, again.payload)

    def _park_refused(self, refused: dict[int, wire.Ack]) -> None:
        for sequence, ack in refused.items():
            if ack.error_code in _ABOUT_THE_MESSAGE:
                outgoing = self._window.pop(sequence)
                origin = last_origin(outgoing.headers)
                stored_ns = origin.stored_ms * 1_000_000 if origin else 0
                message = Message(sequence, stored_ns, outgoing.subject, b"", outgoing.payload)
                self._park(message, f"{ack.error} ({ack.error_code})")

    def _park(self, message: Message, reason: str) -> None:
        if self._options.get("on_poison") == "stop":
            raise _Stop(
                f"message {message.sequence} cannot be copied: {reason}; set on_poison: park to go on without it"
            )
        self._receipt.parked.append(
            Parked(message.sequence, message.stored_ns, printable(message.subject), len(message.payload), reason)
        )
        if len(self._receipt.parked) > _MAX_PARKED:
            raise _Stop(f"more than {_MAX_PARKED} messages of one batch cannot be copied, the last: {reason}")


class _Stop(Exception):  # noqa: N818
    """The target refuses to go on; the text is the receipt's failure."""


class _Staging:
    """Parquet files of what was copied, one per UTC date of the stored time, in one task's name.

    Complete or not there.
    """

    def __init__(self, folder: Path, partition: int) -> None:
        self._folder = folder
        self._name = f"{partition}.parquet"
        self._writers: dict[str, Any] = {}

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for date, writer in self._writers.items():
            writer.close()
            folder = self._folder / f"date={date}"
            if kind is None:
                (folder / f".{self._name}").replace(folder / self._name)

    def add(self, messages: Iterable[Message], nodes: Mapping[int, str | None]) -> None:
        """Add one row per message.

        Node, sequence, stored_at, subject, payload_bytes, payload, payload_raw, metadata.
        """
        from sr_assets.adapters.snapshots import open_writer, snapshot_rows

        by_date: dict[str, list[Message]] = defaultdict(list)
        for message in messages:
            by_date[datetime.fromtimestamp(message.stored_ns // _SECOND_NS, UTC).date().isoformat()].append(message)
        for date, of_date in by_date.items():
            table = snapshot_rows(of_date, nodes)
            if date not in self._writers:
                folder = self._folder / f"date={quote(date)}"
                folder.mkdir(parents=True, exist_ok=True)
                self._writers[date] = open_writer(folder / f".{self._name}")
            self._writers[date].write_table(table)
