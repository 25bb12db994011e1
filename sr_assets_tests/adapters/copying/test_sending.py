"""Refused and unacknowledged copies: parking of single messages, and stopping the stream when the target is the cause."""

import itertools
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from sr_assets.adapters import wire
from sr_assets.adapters.connection_file import write_connection
from sr_assets.adapters.copying import copier
from sr_assets.adapters.copying.copier import Copier, fetch
from sr_assets.adapters.copying.receipt import Receipt
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.wire import Connection, Outgoing, WireError, read_range
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import RunError, TransientError
from sr_assets.domain.messages import Message, header_writer, last_origin
from sr_assets.domain.positions import SequenceRange
from sr_assets_tests.adapters.wire.rig import create_stream, flat, outgoing, publish
from sr_assets_tests.faults.copying import copy_plan
from sr_assets_tests.rig import in_background
from sr_assets_tests.servers import NatsServer

pytestmark = pytest.mark.process

#: A publish on the mapped subject reaches only a subscriber that never responds.
SILENT = 'mappings: { "to.FROM.9": "void.9" }'


class Rig:
    """A source stream FROM with one message on each of FROM.1 … FROM.6, and a target TO on the same server."""

    #: Whether the target accepts fast-ingest batches, and the copies are published in them.
    batched = False

    def __init__(self, server: NatsServer, folder: Path, user: str | None = None) -> None:
        self.cluster = ClusterSettings((server.address,), user, user)
        self.connection = Connection(self.cluster)
        self.folder = folder

    def fill(self, sent: tuple[int, ...] = (1, 2, 3, 4, 5, 6), **target: Any) -> None:
        """Create both streams and store one message per entry of `sent`, on that subject."""
        create_stream(self.connection, "FROM")
        self.create_target(self.connection, **target)
        with Cluster(self.cluster) as admin:
            items = [(f"FROM.{subject}", b"%d" % n, f"{n}") for n, subject in enumerate(sent, 1)]
            assert all(admin.publish_many(items))

    def create_target(self, connection: Connection, **config: Any) -> None:
        """Create the target; `config` replaces its settings."""
        create_stream(connection, "TO", **{"subjects": ["to.FROM.>"], "allow_batched": self.batched, **config})

    def copy(self, count: int = 6, **changes: Any) -> Receipt:
        """Run one writer over all messages."""
        plan = copy_plan(self.folder, self.cluster, "FROM", "TO", next=count + 1, batched=self.batched, **changes)
        return Copier(plan, dict.fromkeys(range(1, count + 1)), 0).run()

    def copied(self, count: int = 6) -> list[int]:
        """Return the source sequences in the target, in its order."""
        stored = flat(read_range(self.connection, "TO", SequenceRange(1, count + 1), direct=True))
        origins = [last_origin(message.headers) for message in stored]
        return [origin.sequence for origin in origins if origin]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with NatsServer(tmp_path, "sending", config=SILENT) as server:
        rig = Rig(server, tmp_path)
        with rig.connection:
            yield rig


@pytest.fixture(autouse=True, params=(False, True), ids=("one by one", "batches"))
def batched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rig, "batched", request.param)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "_REFUSAL_SECONDS", 0.5)


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a writer wait 2 s for an acknowledgement that never comes."""
    monkeypatch.setattr(copier, "_ACK_SECONDS", 2.0)


def test_forbidden_publish_stops_stream_immediately(tmp_path: Path) -> None:
    denied = '{user: mute, password: p, permissions: {publish: {deny: ["to.>"]}}}'
    users = f"authorization {{ users: [{{user: a, password: a}}, {denied}] }}"
    with NatsServer(tmp_path, "denied", config=users) as server:
        rig = Rig(server, tmp_path, user="a")
        with rig.connection:
            rig.fill()
            rig.cluster = ClusterSettings((server.address,), "mute", "p")
            failure = rig.copy().failure
            assert failure is not None
            assert 'Permissions Violation for Publish to "to.FROM.1"; give the user that permission' in failure
            assert rig.copied() == []


def test_message_for_full_subject_is_parked(rig: Rig) -> None:
    rig.fill((1, 2, 1, 1, 4, 2), discard="new", discard_new_per_subject=True, max_msgs_per_subject=1)
    receipt = rig.copy()
    assert (receipt.failure, receipt.copied) == (None, 3)
    assert [parked.sequence for parked in receipt.parked] == [3, 4, 6]
    assert {parked.reason for parked in receipt.parked} == {"maximum messages per subject exceeded (10077)"}
    assert rig.copied() == [1, 2, 5]


def test_many_messages_for_full_subject_leave_others_in_order(rig: Rig, tmp_path: Path) -> None:
    count = 6_000
    create_stream(rig.connection, "FROM")
    rig.create_target(rig.connection, discard="new", discard_new_per_subject=True, max_msgs_per_subject=1)
    # Two of three messages are on a full subject: more than a window, and more than the limit of parked messages.
    subjects = (n if n % 3 == 0 else 0 for n in range(1, count + 1))
    assert not any(ack.error for ack in publish(rig.connection, numbered("FROM", subjects)))
    nodes: dict[int, str | None] = {sequence: f"n{sequence}" for sequence in range(1, count + 1)}
    plan = copy_plan(
        rig.folder, rig.cluster, "FROM", "TO", next=count + 1, staging=str(tmp_path / "staging"), batched=rig.batched
    )
    receipt = Copier(plan, nodes, 0).run()
    expected = [1, *range(3, count + 1, 3)]
    assert (receipt.failure, receipt.copied) == (None, len(expected))
    assert [parked.sequence for parked in receipt.parked] == [n for n in range(2, count + 1) if n % 3]
    assert rig.copied(count) == expected
    (file,) = (tmp_path / "staging").rglob("*.parquet")
    assert parquet.read_table(file, columns=["sequence"], partitioning=None)["sequence"].to_pylist() == expected


def numbered(stream: str, subjects: Iterable[int]) -> Iterator[Outgoing]:
    return (Outgoing(n, f"{stream}.of{subject}", b"", b"%d" % n) for n, subject in enumerate(subjects, 1))


def test_full_target_stops_stream_without_parking(rig: Rig) -> None:
    rig.fill(discard="new", max_msgs=4)
    receipt = rig.copy()
    assert receipt.failure == "target stream TO refuses: maximum messages exceeded (10077)"
    assert (receipt.copied, receipt.parked) == (4, [])


def test_refused_message_waits_while_others_are_stored(rig: Rig) -> None:
    """The target's subjects changed after the plan was made, and no stream accepts to.FROM.4."""
    rig.fill((1, 2, 4, 4, 5, 6), subjects=["to.FROM.1", "to.FROM.2", "to.FROM.5", "to.FROM.6"])
    receipt = rig.copy()
    assert receipt.failure == "target stream TO refuses: no stream takes this subject (503)"
    assert (receipt.copied, receipt.parked) == (4, [])


def test_copies_wait_for_an_account_at_its_limit(tmp_path: Path) -> None:
    """The account stores no further message (10002) until another of its streams is deleted."""
    config = "accounts { A { jetstream { max_file: 1MB, max_mem: 1MB }, users: [{user: a, password: a}] } }"
    with NatsServer(tmp_path, "limited", config=config) as server:
        rig = Rig(server, tmp_path, user="a")
        with rig.connection:
            create_stream(rig.connection, "FROM", storage="memory")
            rig.create_target(rig.connection)
            create_stream(rig.connection, "OTHER")
            assert not any(ack.error for ack in publish(rig.connection, outgoing("FROM", 8, size_bytes=60_000)))
            assert not any(ack.error for ack in publish(rig.connection, outgoing("OTHER", 12, size_bytes=60_000)))
            receipt = rig.copy(8)
            assert receipt.failure == "target stream TO refuses: resource limits exceeded for account (10002)"
            assert receipt.parked == []
            assert 0 < receipt.copied < 8
            rig.connection.request("$JS.API.STREAM.DELETE.OTHER", {})
            receipt = rig.copy(8)
            assert (receipt.failure, receipt.copied, receipt.parked) == (None, 8, [])
            assert rig.copied(8) == list(range(1, 9))


def test_target_refusing_all_stops_stream_without_parking(rig: Rig) -> None:
    rig.fill(subjects=["elsewhere"])
    receipt = rig.copy()
    assert receipt.failure == "target stream TO refuses: no stream takes this subject (503)"
    assert (receipt.copied, receipt.parked) == (0, [])


@pytest.mark.parametrize("subjects", ((1, 2, 9, 4, 5, 6), (1, 2, 3, 4, 5, 9)), ids=("in the middle", "at the end"))
def test_unanswered_message_waits_and_is_resent_once(rig: Rig, short_silence: None, subjects: tuple[int, ...]) -> None:
    rig.fill(subjects)
    with Connection(rig.cluster) as listener:
        listener.send(b"SUB void.> 99\r\n")
        # The server responds after it has processed the subscription.
        listener.request("$JS.API.STREAM.NAMES", {})
        with pytest.raises(WireError, match="no acknowledgement"):
            rig.copy()
        received = [frame for frame in listener.receive(2.0) if frame.subject == b"void.9"]
    silent = subjects.index(9) + 1
    assert rig.copied() == [n for n in range(1, 7) if n != silent]
    # A batch that did not end as expected is followed by single messages.
    assert len(received) == (3 if rig.batched else 2)


def test_rest_of_batch_follows_resent_messages(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target stops responding within the batch, for longer than the writer waits for an acknowledgement."""
    count = 10_000
    with NatsServer(tmp_path / "target", "target") as server, Connection(ClusterSettings((server.address,))) as target:
        rig.fill(sent=())
        publish(rig.connection, outgoing("FROM", count))
        rig.create_target(target)
        pid = server.pid

        def pause(_: object) -> None:
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(2.5, os.kill, (pid, signal.SIGCONT)).start()

        monkeypatch.setattr(copier, "reach", pause)
        connection = str(write_connection(tmp_path / "to", ClusterSettings((server.address,))))
        receipt = rig.copy(count, connection=connection)
        stored = flat(read_range(target, "TO", SequenceRange(1, count + 1), direct=True))
    assert (receipt.failure, receipt.missing, receipt.copied) == (None, [], count)
    assert [origin.sequence for message in stored if (origin := last_origin(message.headers))] == list(
        range(1, count + 1)
    )


def test_batch_with_message_without_outcome_fails(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.fill()
    monkeypatch.setattr(copier, "fetch", lambda *arguments: itertools.islice(fetch(*arguments), 0))
    with pytest.raises(RunError, match="outcomes of only 0 of 6 messages"):
        rig.copy()


def test_copies_that_a_target_never_acknowledges_are_found_there(rig: Rig, short_silence: None) -> None:
    rig.fill(no_ack=True)
    receipt = rig.copy()
    assert (receipt.failure, receipt.copied) == (None, 6)
    assert rig.copied() == [1, 2, 3, 4, 5, 6]


def test_lost_source_fails_batch(rig: Rig, tmp_path: Path) -> None:
    count = 60_000
    rig.create_target(rig.connection)
    with NatsServer(tmp_path, "mortal") as mortal:
        source = ClusterSettings((mortal.address,))
        with Connection(source) as connection:
            create_stream(connection, "FROM", storage="memory")
            assert not any(ack.error for ack in publish(connection, outgoing("FROM", count, size_bytes=600)))
        here = str(write_connection(tmp_path / "source", source))
        kill = partial(kill_after_first_copy, mortal, rig.cluster, "TO")
        with in_background(kill), pytest.raises(WireError, match=str(mortal.port)):
            rig.copy(count, source_connection=here)
    assert 0 < len(rig.copied(count)) < count


@pytest.mark.parametrize("ends_before", (False, True), ids=("other messages", "less"))
def test_recreated_source_is_not_copied(rig: Rig, ends_before: bool) -> None:
    rig.fill((1, 2, 3, 4, 5, 6, 1, 2))
    with Cluster(rig.cluster) as admin:
        planned = admin.stream_info("FROM")
        known = {"source_sequence": planned.last_sequence, "source_ns": planned.last_stored_ns}
        plan = copy_plan(rig.folder, rig.cluster, "FROM", "TO", created_ns=planned.created_ns, **known)
        lists = fetch(rig.connection, plan, [1, 3, 5, 7])
        assert [message.sequence for message in next(lists)[0]] == [1, 3, 5, 7]
        assert [message.sequence for message in next(fetch(rig.connection, plan, [1, 2]))[0]] == [1, 2]
        admin.request_api("STREAM.DELETE.FROM")
        create_stream(rig.connection, "FROM")
        assert all(admin.publish_many([(f"FROM.{n}", b"new", f"{n}") for n in range(1, 3 if ends_before else 12)]))
    for sequences in ([1, 3, 5, 7], [1, 2], [7, 8]):
        with pytest.raises((TransientError, WireError), match=r"was recreated or rolled back|which it held"):
            list(fetch(rig.connection, plan, sequences))


def test_copy_of_other_message_at_same_sequence_is_refused(rig: Rig) -> None:
    """A source that was rolled back after an interrupted batch holds other messages at the copied sequences."""
    rig.fill((1, 2, 3))
    assert rig.copy(2).copied == 2
    with Cluster(rig.cluster) as admin:
        admin.request_api("STREAM.PURGE.FROM", {"keep": 0})
        admin.request_api("STREAM.DELETE.FROM")
        create_stream(rig.connection, "FROM")
        assert all(admin.publish_many([(f"FROM.{n}", b"new", f"{n}") for n in range(1, 4)]))
    with pytest.raises(RunError, match="holds another message 1 than the one that was copied"):
        rig.copy(3)
    assert rig.copied() == [1, 2]


@pytest.mark.parametrize("batch_messages", (700, 3_000))
def test_batch_between_other_writers_messages_is_located_in_the_target(
    rig: Rig, batch_messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 3_000
    publisher = partial(wire.BatchPublisher, max_messages=batch_messages)
    monkeypatch.setattr(wire, "BatchPublisher", publisher)
    rig.fill(sent=())
    publish(rig.connection, outgoing("FROM", count))
    with Connection(rig.cluster) as other:
        ended = threading.Event()

        def disturb() -> None:
            for n in itertools.count():
                publish(other, [Outgoing(n, "to.FROM.other", b"", b"")])
                if ended.is_set():
                    return

        with in_background(disturb):
            try:
                receipt = rig.copy(count)
            finally:
                ended.set()
        last = rig.connection.request_api("STREAM.INFO.TO")["state"]["last_seq"]
    stored = flat(read_range(rig.connection, "TO", SequenceRange(1, last + 1), direct=True))
    copies = {message.sequence: origin.sequence for message in stored if (origin := last_origin(message.headers))}
    assert list(copies.values()) == list(range(1, count + 1))
    assert len(copies) < len(stored)
    located = {at + n: first + n for at, first, length in receipt.copied_ranges for n in range(length)}
    assert (receipt.failure, receipt.copied, located) == (None, count, copies)


def test_requests_of_a_writer_do_not_grow_with_the_copies_it_finds(rig: Rig) -> None:
    """A request for each few copies makes a writer far from its target several times slower."""
    rig.fill(sent=())
    publish(rig.connection, outgoing("FROM", 1_200))

    def requests(batch: range, rows: range, copied_before: int) -> int:
        before = int(rig.connection.request_api("INFO")["api"]["total"])
        changes = {"first": batch.start, "next": batch.stop, "since": batch.start - 1, "batched": rig.batched}
        plan = copy_plan(rig.folder, rig.cluster, "FROM", "TO", **changes)
        receipt = Copier(plan, dict.fromkeys(rows), 0).run()
        assert (receipt.failure, receipt.copied, receipt.found) == (None, len(rows), copied_before)
        return int(rig.connection.request_api("INFO")["api"]["total"]) - before

    counts = []
    for batch in (range(1, 201), range(201, 1_201)):
        requests(batch, batch[::2], 0)
        counts.append((requests(batch, batch[1::2], 0), requests(batch, batch, len(batch))))
    assert counts[0] == counts[1]


def test_target_that_lost_messages_since_the_intent_gets_no_copies(rig: Rig) -> None:
    """Copies would take the places of the lost messages."""
    rig.fill()
    publish(rig.connection, [Outgoing(1, "to.FROM.other", b"", b"")])
    with pytest.raises(TransientError, match="target stream TO ends at 1, before 2: it lost messages during the copy"):
        rig.copy(since=2)
    assert rig.copy(since=1).copied == 6


def test_batch_of_copies_that_no_intent_explains_is_refused(rig: Rig) -> None:
    rig.fill()
    rig.copy()
    receipt = rig.copy(since=6)
    assert receipt.failure is not None
    assert "another replicator" in receipt.failure
    assert rig.copied() == list(range(1, 7))


#: A forged copy of message 3: other payload, other headers, other time, a sequence of no message.
FORGERIES: dict[str, dict[str, Any]] = {
    "payload": {"payload": b"forged"},
    "header": {"headers": b"NATS/1.0\r\nA: b\r\n\r\n"},
    "time": {"later_ns": 10**9},
    "outside": {"sequence": 2**63 - 1},
    "second": {"sequence": 7, "payload": b"forged"},
}


def test_forged_copy_replaces_no_message_of_a_lane(rig: Rig) -> None:
    """The writer of FROM.3 neither believes the forged copies of its message nor takes those of another lane for its own."""
    rig.fill()
    plan = copy_plan(rig.folder, rig.cluster, "FROM", "TO", next=7, lanes=("FROM.3", "FROM.4"), filter="FROM.3")
    write = header_writer(plan.replicator, plan.name, plan.source_stream, plan.created_ns)
    for original in flat(read_range(rig.connection, "FROM", SequenceRange(3, 5), direct=True)):
        headers = write(b"", original.sequence, original.stored_ns, 0)
        publish(rig.connection, [Outgoing(1, "to.FROM.forged", headers, b"forged")])
    receipt = Copier(plan, None, 0).run()
    assert (receipt.failure, receipt.copied, receipt.found, receipt.forged) == (None, 1, 0, 1)
    repeated = Copier(plan, None, 0).run()
    assert (repeated.copied, repeated.found, repeated.forged) == (1, 1, 1)


@pytest.mark.parametrize("before", (False, True), ids=("after the intent", "before the intent"))
@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_copy_neither_stops_nor_replaces_a_message(rig: Rig, forgery: str, before: bool) -> None:
    rig.fill((1, 2, 3, 4, 5, 6, 7))
    wanted: dict[str, Any] = {"sequence": 3, "payload": None, "headers": b"", "later_ns": 0, **FORGERIES[forgery]}
    originals = {m.sequence: m for m in flat(read_range(rig.connection, "FROM", SequenceRange(1, 8), direct=True))}
    original = originals.get(wanted["sequence"], originals[3])
    with Cluster(rig.cluster) as admin:
        info = admin.stream_info("FROM")
    known: dict[str, Any] = {"source_sequence": 7, "source_ns": info.last_stored_ns, "created_ns": info.created_ns}
    plan = copy_plan(rig.folder, rig.cluster, "FROM", "TO", next=7, **known)
    write = header_writer(plan.replicator, plan.name, plan.source_stream, plan.created_ns)
    headers = write(wanted["headers"], wanted["sequence"], original.stored_ns + wanted["later_ns"], 0)
    payload = original.payload if wanted["payload"] is None else wanted["payload"]
    (ack,) = publish(rig.connection, [Outgoing(1, "to.FROM.forged", headers, payload)])
    assert not ack.error
    receipt = rig.copy(since=int(before), **known)
    assert (receipt.failure, receipt.copied, receipt.found) == (None, 6, 0)
    assert receipt.forged == (0 if before else 1)
    stored = flat(read_range(rig.connection, "TO", SequenceRange(2, 8), direct=True))
    # A message whose id the server knows from the forged one is sent again, after the others.
    assert sorted(message.payload for message in stored) == [originals[n].payload for n in range(1, 7)]
    assert rig.copy(since=int(before), **known).found == 6


#: More than 70 % of `max_payload`, so that its copy is not read back by the API.
LARGE = b"m" * 800_000


@pytest.mark.parametrize("forged", (b"forged", b"f" * len(LARGE), b""), ids=("short", "same size", "empty"))
def test_forged_copy_of_a_large_message_replaces_none(rig: Rig, forged: bytes) -> None:
    rig.fill(sent=())
    publish(rig.connection, [Outgoing(n, "FROM.1", b"", LARGE + b"%d" % n) for n in range(1, 3)])
    with Cluster(rig.cluster) as admin:
        info = admin.stream_info("FROM")
    known: dict[str, Any] = {"source_sequence": 2, "source_ns": info.last_stored_ns, "created_ns": info.created_ns}
    plan = copy_plan(rig.folder, rig.cluster, "FROM", "TO", next=3, **known)
    write = header_writer(plan.replicator, plan.name, plan.source_stream, plan.created_ns)
    (original, _) = flat(read_range(rig.connection, "FROM", SequenceRange(1, 3), direct=True))
    headers = write(b"", 1, original.stored_ns, 0)
    publish(rig.connection, [Outgoing(1, "to.FROM.1", headers, forged and forged + b"1"[: len(forged) // len(LARGE)])])
    receipt = rig.copy(2, since=0, **known)
    assert (receipt.failure, receipt.copied, receipt.found, receipt.forged) == (None, 2, 0, 1)
    stored = flat(read_range(rig.connection, "TO", SequenceRange(2, 5), direct=True))
    assert sorted(message.payload for message in stored) == [LARGE + b"1", LARGE + b"2"]
    assert rig.copy(2, since=0, **known).found == 2


def test_many_batches_copy_all_messages(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = partial(wire.BatchPublisher, max_messages=100)
    monkeypatch.setattr(wire, "BatchPublisher", publisher)
    rig.fill(sent=())
    publish(rig.connection, outgoing("FROM", 1_050))
    receipt = rig.copy(1_050)
    assert (receipt.failure, receipt.copied, receipt.batched) == (None, 1_050, 1_050 if rig.batched else 0)
    assert rig.copied(1_050) == list(range(1, 1_051))


def test_receipt_counts_copies_of_batches(rig: Rig) -> None:
    rig.fill()
    receipt = rig.copy()
    assert (receipt.copied, receipt.batched) == (6, 6 if rig.batched else 0)
    assert (receipt.copied_ranges, receipt.target_sequence, receipt.target_holds) == ([(1, 1, 6)], 6, 6)
    repeated = rig.copy()
    assert (repeated.copied, repeated.found, repeated.batched) == (6, 6, 0)


def kill_after_first_copy(server: NatsServer, cluster: ClusterSettings, target: str) -> None:
    """Kill a server once the target holds a message."""
    with Cluster(cluster) as admin:
        while not admin.stream_info(target).last_sequence:
            pass
    server.kill()


class FullDisk(Copier):
    """A writer that cannot stage a row."""

    def _stage(self, messages: list[Message]) -> None:
        raise OSError(f"no space for {len(messages)} rows")


def test_error_of_the_staging_is_not_hidden_by_another(rig: Rig) -> None:
    rig.fill()
    plan = copy_plan(rig.folder, rig.cluster, "FROM", "TO", next=7, batched=rig.batched)
    with pytest.raises(OSError, match="no space"):
        FullDisk(plan, dict.fromkeys(range(1, 7)), 0).run()
