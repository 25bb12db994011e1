"""One contract for every supported server version and the simulated server: reader, writer and administration; then a whole
run on the oldest.

Each version has one server for all tests; streams use file and memory storage, with and without direct get.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.copying import copier
from sr_assets.adapters.copying.copier import Copier
from sr_assets.adapters.copying.receipt import Receipt
from sr_assets.adapters.jetstream import STREAM_NOT_FOUND, ApiError
from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.wire import (
    Connection,
    Outgoing,
    next_message,
    read_confirmed,
    read_headers,
    read_range,
    read_sequences,
    reading,
    stored_message,
)
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import MESSAGE_ID_HEADER, Message, header_values, last_origin
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.refusals import HEADERS_TOO_LARGE, MESSAGE_TOO_LARGE
from sr_assets.domain.target_stream import target_config
from sr_assets.stages.connectivity import probe_connectivity
from sr_assets_tests.adapters.wire.rig import (
    ODD_HEADERS,
    Names,
    consumer_count,
    create_stream,
    delete,
    flat,
    outgoing,
    publish,
)
from sr_assets_tests.axes import combinations
from sr_assets_tests.faults.copying import copy_plan
from sr_assets_tests.rig import Rig, Sent, address, cluster, wait_until
from sr_assets_tests.server_versions import MINORS, server_binary
from sr_assets_tests.servers import NatsServer
from sr_assets_tests.sim.server import VERSION
from sr_assets_tests.sim.tcp import TcpServer

Write = Callable[..., Receipt]
#: The simulated server among the versions.
SIMULATED = "simulated"
#: The versions of the gate: the oldest, the newest, and the simulated one.
GATE_VERSIONS = (MINORS[0], MINORS[-1], SIMULATED)
#: Error codes of a full stream, and of an unexpected last sequence.
STREAM_FULL = 10077
WRONG_LAST_SEQUENCE = 10071


#: What the tests vary, with the names of the values.
AXES: dict[str, dict[str, object]] = {
    "version": {version: version for version in (*MINORS, SIMULATED)},
    "storage": {"file": "file", "memory": "memory"},
    "direct": {"direct": True, "no_direct": False},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on every combination; the gate leaves out the versions between, and half of the combinations of three."""
    axes = {name: values for name, values in AXES.items() if name in metafunc.fixturenames}
    cases = combinations(axes)
    if "version" in axes:
        cases = [
            pytest.param(*case.values, id=case.id, marks=pytest.mark.nightly if between else case.marks)
            for case in cases
            for between in [not {*GATE_VERSIONS}.intersection(case.values)]
        ]
    metafunc.parametrize(list(axes), cases, indirect=True, scope="module")


@pytest.fixture(scope="module")
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def minor(version: str) -> str:
    return VERSION.rpartition(".")[0] if version == SIMULATED else version


@pytest.fixture(scope="module")
def server(version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer | TcpServer]:
    if version == SIMULATED:
        with TcpServer() as simulated:
            yield simulated
        return
    home = tmp_path_factory.mktemp("version") / version
    with NatsServer(home, "versioned", binary=server_binary(version)) as started:
        yield started


@pytest.fixture
def connection(server: NatsServer) -> Iterator[Connection]:
    with Connection(address(server)) as opened:
        yield opened


@pytest.fixture
def admin(server: NatsServer) -> Iterator[Cluster]:
    with cluster(server) as opened:
        yield opened


@pytest.fixture
def storage(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def direct(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def stream(connection: Connection, unique: Names, storage: str, direct: bool) -> str:
    return create_stream(connection, unique("V"), storage=storage, allow_direct=direct)


def read_modes(direct: bool) -> tuple[bool, ...]:
    """Return the read modes of a stream: always a consumer, and direct get if allowed."""
    return (False, True) if direct else (False,)


def test_server_has_the_requested_version(minor: str, admin: Cluster, connection: Connection) -> None:
    assert f"{admin.server_version[0]}.{admin.server_version[1]}" == minor
    assert connection.server_version.startswith(f"{minor}.")


# ------------------------------------------------------------------------------------------------------------ reading


def test_every_read_mode_returns_the_same_bytes_in_order(
    connection: Connection, stream: str, direct: bool, minor: str
) -> None:
    payloads = (b"", bytes(range(256)), b"\r\nPING\r\n", b"{}", b"x" * 900_000, b"\0", b"last")
    odd = [Outgoing(n, f"{stream}.x", h, p) for n, (h, p) in enumerate(zip(ODD_HEADERS, payloads, strict=True), 1)]
    sent = [*odd, *outgoing(stream, 293, first=8)]
    assert [ack.target_sequence for ack in publish(connection, sent)] == list(range(1, 301))
    deleted_sequences = {10, 40, *range(60, 120), 299}
    delete(connection, stream, *deleted_sequences)
    existing = [item for item in sent if item.sequence not in deleted_sequences]
    reads: list[list[Message]] = []
    for use_direct in read_modes(direct):
        reads.append(flat(read_confirmed(connection, stream, SequenceRange(0, 301), direct=use_direct)))
        reads.append(flat(read_sequences(connection, stream, range(1, 400), direct=False)))
        assert flat(read_confirmed(connection, stream, SequenceRange(60, 120), direct=use_direct)) == []
        assert flat(read_confirmed(connection, stream, SequenceRange(301, 999), direct=use_direct)) == []
        inside = flat(read_confirmed(connection, stream, SequenceRange(5, 130), direct=use_direct, max_bytes=3000))
        assert inside == reads[0][4:67]
        # Servers before 2.11 have no batched direct get: a hole ends the response.
        if minor != "2.10" or not use_direct:
            assert (
                flat(read_range(connection, stream, SequenceRange(0, 301), batch_messages=7, direct=use_direct))
                == reads[0]
            )
    assert all(read == reads[0] for read in reads)
    assert [(m.sequence, m.subject, m.headers, m.payload) for m in reads[0]] == [
        (item.sequence, item.subject, item.headers, item.payload) for item in existing
    ]


def test_filtered_single_and_next_messages_are_found(connection: Connection, stream: str, direct: bool) -> None:
    sent = outgoing(stream, 200)
    publish(connection, sent)
    delete(connection, stream, 24, 150, 200)
    scattered = [1, 24, 30, *range(100, 180), 199, 200, 5000]
    for use_direct in read_modes(direct):
        filtered = read_confirmed(
            connection, stream, SequenceRange(20, 60), filter_subject=f"{stream}.3", direct=use_direct, max_bytes=60
        )
        assert [m.sequence for m in flat(filtered)] == [31, 38, 45, 52, 59]
    runs = flat(read_sequences(connection, stream, [1, 24, 30, 199, 200, 5000], direct=direct))
    assert [m.sequence for m in runs] == [1, 30, 199]
    read = flat(read_sequences(connection, stream, scattered, direct=False))
    assert [m.sequence for m in read] == [s for s in scattered if s < 200 and s not in (24, 150)]
    following = [next_message(connection, stream, s, f) for s, f in ((24, None), (24, f"{stream}.3"), (200, None))]
    assert [message and message.sequence for message in following] == [25, 31, None]
    assert stored_message(connection, stream, 150) is None
    assert stored_message(connection, stream, 30) == read[1]


def test_headers_are_read_without_payloads(connection: Connection, stream: str) -> None:
    publish(connection, [Outgoing(n, f"{stream}.x", h, b"payload") for n, h in enumerate(ODD_HEADERS[:5], 1)])
    delete(connection, stream, 3)
    read = flat(read_headers(connection, stream, SequenceRange(2, 6)))
    assert [(m.sequence, m.headers, m.payload) for m in read] == [(n, ODD_HEADERS[n - 1], b"") for n in (2, 4, 5)]
    assert consumer_count(connection, stream) == 0


def test_messages_that_fill_a_request_exactly_cause_no_wait(
    connection: Connection, stream: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All servers end a pull without a status if its messages fill `max_bytes` exactly; a wait for it would last an hour."""
    publish(connection, [Outgoing(n, f"{stream}.x", b"NATS/1.0\r\nA: b\r\n\r\n", b"x" * 40) for n in range(1, 10)])
    whole = SequenceRange(1, 10)
    # The sizes that a server counts: subject, reply subject, headers, payload.
    reply = f"$JS.ACK.{stream}.sr_0123456789abcdef.1.1.1.{time.time_ns()}.1"
    fixed_bytes = len(f"{stream}.x") + len(reply)
    size_bytes = fixed_bytes + len("NATS/1.0\r\nA: b\r\n\r\n") + 40
    header_bytes = fixed_bytes + len("NATS/1.0\r\nA: b\r\nNats-Msg-Size: 40\r\n\r\n")
    connection.silence_seconds = 3_600.0
    for count, offset in itertools.product((1, 2, 3, 4, 8, 9, 10), (-1, 0, 1)):
        for use_direct in read_modes(direct):
            lists = list(
                read_confirmed(connection, stream, whole, direct=use_direct, max_bytes=count * size_bytes + offset)
            )
            assert [message.sequence for message in flat(lists)] == list(range(1, 10))
            if not use_direct and offset == 0:
                # At the exact boundary, as many messages as fit are delivered.
                assert len(lists[0]) == min(count, 9)
        monkeypatch.setattr(reading, "BATCH_BYTES", count * header_bytes + offset)
        lists = list(read_headers(connection, stream, whole))
        assert [message.sequence for message in flat(lists)] == list(range(1, 10))
        if offset == 0:
            assert len(lists[0]) == min(count, 9)
    assert consumer_count(connection, stream) == 0


def test_messages_missing_on_a_mirror_are_read_from_the_leader(
    connection: Connection, stream: str, direct: bool
) -> None:
    """A mirror that holds only the last ten messages serves direct gets for the stream."""
    publish(connection, outgoing(stream, 400))
    config = {"name": f"{stream}_M", "mirror": {"name": stream}, "max_msgs": 10, "mirror_direct": direct}
    assert "error" not in connection.request(f"$JS.API.STREAM.CREATE.{stream}_M", {**config, "allow_direct": direct})
    wait_until(lambda: last_sequence(connection, f"{stream}_M") == 400, "the mirror")
    delete(connection, stream, 7, 200)
    existing = [n for n in range(1, 401) if n not in (7, 200)]
    for use_direct, _ in itertools.product(read_modes(direct), range(8)):
        read = flat(read_confirmed(connection, stream, SequenceRange(1, 401), direct=use_direct, max_bytes=4000))
        assert [message.sequence for message in read] == existing
        singles = flat(read_sequences(connection, stream, range(1, 401, 2), direct=use_direct))
        assert [message.sequence for message in singles] == [n for n in existing if n % 2]


# ------------------------------------------------------------------------------------------------------------ writing


@pytest.fixture
def batched(minor: str, direct: bool) -> dict[str, bool]:
    """Fast-ingest batches, where the server has them."""
    return {"allow_batched": True} if direct and tuple(map(int, minor.split("."))) >= (2, 14) else {}


@pytest.fixture
def target(connection: Connection, stream: str, storage: str, direct: bool, batched: dict[str, bool]) -> str:
    """The target of the copies of `stream`, with the subject prefix `to.`."""
    subjects = [f"to.{stream}.>"]
    return create_stream(connection, f"{stream}_T", subjects=subjects, storage=storage, allow_direct=direct, **batched)


@pytest.fixture
def write(
    server: NatsServer, stream: str, target: str, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Write:
    """Return a function that copies sequences of `stream` into `target` in this process."""
    monkeypatch.setattr(copier, "_REFUSAL_SECONDS", 0.2)
    plan = copy_plan(tmp_path, address(server), stream, target, direct=direct, batched=True)

    def task(sequences: Any, **changes: Any) -> Receipt:
        return Copier(replace(plan, **changes), dict.fromkeys(sequences), 0).run()

    return task


def copies(connection: Connection, target: str) -> list[Message]:
    return flat(read_confirmed(connection, target, SequenceRange(1, 10_000), direct=False))


def origins(connection: Connection, target: str) -> list[int]:
    """Return the source sequences of the copies in the target, in order."""
    return [origin.sequence for copy in copies(connection, target) if (origin := last_origin(copy.headers))]


def last_sequence(connection: Connection, stream: str) -> int:
    return int(connection.request(f"$JS.API.STREAM.INFO.{stream}", {})["state"]["last_seq"])


def test_messages_are_copied_once_in_order_on_repeated_writes(
    connection: Connection, stream: str, target: str, write: Write
) -> None:
    sent = outgoing(stream, 1000)
    publish(connection, sent)
    delete(connection, stream, 7, 500)
    first, repeated = write(range(1, 1001)), write(range(1, 1001))
    assert (first.copied, first.found, first.missing, first.failure) == (998, 0, [(7, 8), (500, 501)], None)
    assert (repeated.copied, repeated.found, repeated.missing, repeated.failure) == (
        998,
        998,
        [(7, 8), (500, 501)],
        None,
    )
    assert origins(connection, target) == [s for s in range(1, 1001) if s not in (7, 500)]
    existing = [item for item in sent if item.sequence not in (7, 500)]
    assert [copy.payload for copy in copies(connection, target)] == [item.payload for item in existing]
    assert [copy.subject for copy in copies(connection, target)] == [f"to.{item.subject}" for item in existing]


def test_second_attempt_completes_a_partial_copy(
    connection: Connection, stream: str, target: str, write: Write
) -> None:
    publish(connection, outgoing(stream, 300))
    assert write([*range(1, 50), *range(60, 90), 250]).copied == 80
    receipt = write(range(1, 301))
    assert (receipt.copied, receipt.found, receipt.failure) == (300, 80, None)
    assert sorted(origins(connection, target)) == list(range(1, 301))
    sparse = write(range(1, 301, 3))
    assert (sparse.copied, sparse.found) == (100, 100)
    assert len(copies(connection, target)) == 300


def test_duplicate_of_a_purged_copy_is_resent(connection: Connection, stream: str, target: str, write: Write) -> None:
    publish(connection, outgoing(stream, 50))
    write(range(1, 51))
    for time_purged in (1, 2):
        connection.request(f"$JS.API.STREAM.PURGE.{target}", {})
        receipt = write(range(1, 51), since=last_sequence(connection, target))
        assert (receipt.failure, receipt.copied, receipt.found) == (None, 50, 0)
        assert origins(connection, target) == list(range(1, 51))
        ids = [header_values(copy.headers, MESSAGE_ID_HEADER)[-1] for copy in copies(connection, target)]
        assert all(message_id.endswith(b"/r%d" % time_purged) for message_id in ids)


def test_unexplained_duplicate_means_another_writer(
    connection: Connection, stream: str, target: str, write: Write
) -> None:
    publish(connection, outgoing(stream, 5))
    write(range(1, 6))
    assert "another replicator" in (write(range(1, 6), since=5).failure or "")
    with pytest.raises(RunError, match="another replicator"):
        write(range(1, 3), next=3)
    assert len(copies(connection, target)) == 5


def test_error_of_one_message_parks_only_that_message(
    connection: Connection, stream: str, unique: Names, storage: str, write: Write
) -> None:
    small = create_stream(connection, unique("SMALL"), storage=storage, max_msg_size=60_000)
    block = b"NATS/1.0\r\nA: " + b"x" * 65_500 + b"\r\n\r\n"
    sent = outgoing(stream, 9)
    sent[3] = Outgoing(4, f"{stream}.big", b"", b"x" * 70_000)
    sent[5] = Outgoing(6, f"{stream}.a.b", b"", b"elsewhere")
    assert not any(ack.error for ack in publish(connection, sent))
    receipt = write(range(1, 10), stream=small, prefix=small, subjects=(f"{small}.{stream}.*",))
    assert (receipt.copied, receipt.failure) == (7, None)
    assert sorted(parked.sequence for parked in receipt.parked) == [4, 6]
    reasons = {parked.sequence: parked.reason for parked in receipt.parked}
    assert f"({MESSAGE_TOO_LARGE})" in reasons[4]
    assert "does not take subject" in reasons[6]
    assert origins(connection, small) == [1, 2, 3, 5, 7, 8, 9]
    large = [Outgoing(10, f"{stream}.x", block, b""), *outgoing(stream, 1, first=11)]
    assert not any(ack.error for ack in publish(connection, large))
    receipt = write((10, 11))
    assert [parked.sequence for parked in receipt.parked] == [10]
    assert f"({HEADERS_TOO_LARGE})" in receipt.parked[0].reason
    assert "on_poison" in (write((10,), since=1, on_poison="stop").failure or "")


@pytest.mark.parametrize("limit", ({"max_msgs": 4}, {"max_bytes": 1500}), ids=str)
def test_full_target_stops_the_batch_until_it_has_room(
    connection: Connection,
    stream: str,
    target: str,
    storage: str,
    direct: bool,
    write: Write,
    limit: dict[str, int],
    batched: dict[str, bool],
) -> None:
    config = {**batched, "name": target, "subjects": [f"to.{stream}.>"], "storage": storage, "allow_direct": direct}
    full = {**config, "discard": "new", **limit}
    assert "error" not in connection.request(f"$JS.API.STREAM.UPDATE.{target}", full)
    publish(connection, outgoing(stream, 30))
    receipt = write(range(1, 31))
    assert f"({STREAM_FULL})" in (receipt.failure or "")
    existing = origins(connection, target)
    assert 0 < len(existing) == receipt.copied < 30
    assert "error" not in connection.request(f"$JS.API.STREAM.UPDATE.{target}", config)
    receipt = write(range(1, 31))
    assert (receipt.failure, receipt.copied, receipt.found) == (None, 30, len(existing))
    assert origins(connection, target) == list(range(1, 31))


def test_control_headers_do_not_reach_the_target(
    connection: Connection, unique: Names, storage: str, minor: str, write: Write, target: str, stream: str
) -> None:
    options = {} if minor == "2.10" else {"allow_msg_ttl": True}
    controlled = create_stream(connection, unique("STEER"), storage=storage, allow_rollup_hdrs=True, **options)
    lines = (
        b"Nats-TTL: 1h",
        b"Nats-Rollup: sub",
        b"Nats-Expected-Stream: " + controlled.encode(),
        b"Nats-Msg-Id: mine",
    )
    sent = [
        Outgoing(n, f"{controlled}.{n}", b"NATS/1.0\r\n%b\r\nKeep: 1\r\n\r\n" % line, b"")
        for n, line in enumerate(lines, 1)
    ]
    assert not any(ack.error for ack in publish(connection, sent))
    receipt = write(range(1, 5), source_stream=controlled, subjects=(f"to.{stream}.>",), prefix=f"to.{stream}")
    assert (receipt.copied, receipt.parked, receipt.failure) == (4, [], None)
    for copy in copies(connection, target):
        names = [line.partition(b":")[0] for line in copy.headers.split(b"\r\n")[1:] if line]
        assert names == [b"Keep", b"Choria-SR-Source", b"Nats-Msg-Id"]


def test_full_target_subject_parks_only_its_messages(
    connection: Connection, stream: str, storage: str, write: Write
) -> None:
    config = {"storage": storage, "discard": "new", "discard_new_per_subject": True, "max_msgs_per_subject": 1}
    target = create_stream(connection, f"{stream}_ONE", subjects=[f"one.{stream}.>"], **config)
    publish(connection, outgoing(stream, 10))
    receipt = write(range(1, 11), stream=target, subjects=(f"one.{stream}.>",), prefix="one")
    assert (receipt.copied, receipt.failure) == (7, None)
    assert [(parked.sequence, parked.reason) for parked in receipt.parked] == [
        (sequence, "maximum messages per subject exceeded (10077)") for sequence in (8, 9, 10)
    ]


# ----------------------------------------------------------------------------------------------------- administration


def test_stream_info_reports_positions_and_times(
    admin: Cluster, connection: Connection, stream: str, storage: str
) -> None:
    empty = admin.stream_info(stream)
    assert (empty.last_sequence, empty.messages, empty.last_stored_ns) == (0, 0, None)
    publish(connection, outgoing(stream, 10))
    delete(connection, stream, 2, 3, 5)
    info = admin.stream_info(stream)
    assert (info.first_sequence, info.last_sequence, info.messages, info.num_deleted) == (1, 10, 7, 3)
    assert (info.config["storage"], info.retention, info.subjects, info.replicas) == (
        storage,
        "limits",
        (f"{stream}.>",),
        1,
    )
    assert info.created_ns == empty.created_ns
    assert info.ts_ns is not None
    assert info.last_stored_ns is not None
    assert info.created_ns < info.last_stored_ns < info.ts_ns
    assert admin.stream_names(f"{stream}.x") == [stream]
    assert stream in admin.stream_names()
    messages = [admin.next_message(stream, 2), admin.next_message(stream, 11), admin.last_message(stream)]
    assert [message and message.sequence for message in messages] == [4, None, 10]
    assert (admin.message(stream, 2), messages[0]) == (None, admin.message(stream, 4))
    with pytest.raises(ApiError) as caught:
        admin.stream_info("NOT_HERE")
    assert caught.value.code == STREAM_NOT_FOUND


def test_publications_are_acknowledged_and_permission_is_verified(admin: Cluster, stream: str) -> None:
    admin.try_publishing(f"{stream}.x")
    for count in (600, 2):
        deliveries = admin.publish_many([(f"{stream}.x", b"", f"{stream}-{n}") for n in range(count)])
        assert all(delivery.acknowledged for delivery in deliveries)
    assert admin.stream_info(stream).last_sequence == 600
    assert not admin.publish_many([(f"{stream}_NOBODY.x", b"", "n")])[0].acknowledged


#: Source options that a target does not get, by the version that introduced them.
_LATER: dict[str, dict[str, Any]] = {
    "2.11": {"allow_msg_ttl": True, "subject_delete_marker_ttl": 60_000_000_000, "allow_rollup_hdrs": True},
    "2.12": {"allow_atomic": True, "allow_msg_schedules": True},
}


def full_config(name: str, storage: str, version: tuple[int, int, int]) -> dict[str, Any]:
    """Return a source configuration with the options of the server's version."""
    config: dict[str, Any] = {"name": name, "subjects": [f"{name}.>"], "storage": storage, "max_age": 3_600_000_000_000}
    config |= {"max_msgs": 1000, "max_msgs_per_subject": 5, "max_msg_size": 4000, "discard": "old", "compression": "s2"}
    config |= {"metadata": {"owner": "x"}, "deny_delete": True, "consumer_limits": {"max_ack_pending": 5}}
    config |= {"subject_transform": {"src": f"{name}.in.>", "dest": f"{name}.out.>"}}
    for minor, keys in _LATER.items():
        if version >= tuple(map(int, f"{minor}.0".split("."))):
            config |= keys
    return config


@pytest.mark.parametrize("newest_first", (True, False), ids=("from_packaged", "to_packaged"))
def test_target_is_created_from_a_source_of_another_version(
    admin: Cluster, nats_server: NatsServer, unique: Names, storage: str, newest_first: bool
) -> None:
    name = unique("RICH")
    with cluster(nats_server) as packaged:
        source, target = (packaged, admin) if newest_first else (admin, packaged)
        info = source.create_stream(full_config(name, storage, source.server_version))
        config = target_config(f"{name}_COPY", [f"copy.{name}.>"], {**info.config, "num_replicas": 3})
        copy = target.create_stream(config)
    assert (copy.subjects, copy.config["storage"], copy.replicas) == ((f"copy.{name}.>",), storage, 1)
    assert (copy.allow_direct, copy.config["max_msg_size"], copy.max_msgs_per_subject) == (True, -1, 5)
    not_copied = (
        "allow_msg_ttl",
        "allow_atomic",
        "allow_msg_schedules",
        "subject_transform",
        "deny_delete",
        "allow_rollup_hdrs",
    )
    assert not any(copy.config.get(key) for key in not_copied)


def test_connectivity_probes_all_succeed(server: NatsServer, tmp_path: Path, unique: Names, direct: bool) -> None:
    rig = Rig(tmp_path, server, server, unique)
    stream, existing = rig.make(allow_direct=direct), rig.unique("T")
    rig.publish(stream, [Sent(b"x")])
    rig.create(existing, allow_direct=direct)
    rig.add(stream, target_stream=existing, target_subject_prefix=existing)
    rig.add(stream, name="OTHER", target_stream=rig.unique("NEW"), target_subject_prefix="new")
    probes = probe_connectivity(rig.settings())
    assert [probe for probe in probes if not probe.works] == []
    assert len(probes) > 12


def test_asynchronous_target_needs_a_server_that_knows_it(
    server: NatsServer, admin: Cluster, tmp_path: Path, unique: Names
) -> None:
    rig = Rig(tmp_path, server, server, unique)
    stream = rig.make()
    rig.publish(stream, [Sent(b"x")])
    rig.add(stream, target_stream=f"{stream}_T", target_subject_prefix="to", target={"persist": "async"})
    if admin.server_version < (2, 12):
        assert "target.persist async needs nats-server 2.12 or later" in rig.failure()
    else:
        rig.drain()
        assert rig.info(f"{stream}_T").config["persist_mode"] == "async"


# -------------------------------------------------------------------------------------------------- the whole site run


def test_site_runs_on_the_oldest_server(engine_home: Path, unique: Names, tmp_path: Path, direct: bool) -> None:
    with NatsServer(tmp_path, "oldest", binary=server_binary(MINORS[0])) as oldest:
        rig = Rig(engine_home, oldest, oldest, unique)
        plain, tracked, feed = rig.make(allow_direct=direct), rig.make(allow_direct=direct), rig.make("FEED")
        rig.publish(plain, [Sent(b"%d" % n) for n in range(3000)])
        rig.publish(tracked, [Sent(json.dumps({"sender": f"n{n % 40}", "n": n}).encode()) for n in range(400)])
        rig.add(plain, target_stream=f"{plain}_T", target_subject_prefix="to")
        rig.add(
            tracked,
            target_stream=f"{tracked}_T",
            target_subject_prefix="to",
            inspect_field="sender",
            inspect_duration="10m",
            advisory={"subject": f"{feed}.%s.%v", "reliable": True},
        )
        rig.drain()
        assert [int(copy.payload) for copy in rig.copies(f"{plain}_T")] == list(range(3000))
        assert [json.loads(copy.payload)["n"] for copy in rig.copies(f"{tracked}_T")] == list(range(40))
        assert len({advisory.headers for advisory in rig.stored(feed)}) == len(rig.stored(feed)) == 40
        rows = {row["stream"]: row for row in rig.rows("replication")}
        assert (rows[plain]["copied_messages"], rows[plain]["lag_messages"]) == (3000, 0)
        assert (rows[tracked]["seen_messages"], rows[tracked]["skipped_messages"]) == (400, 360)
        assert rows[tracked]["watermark"] is not None
        assert rig.row("SELECT count(*) AS n FROM last_seen_nodes")["n"] == 40
        rig.publish(plain, [Sent(b"%d" % n) for n in range(3000, 3100)])
        for sequence in (3010, 3011):
            rig.api(f"STREAM.MSG.DELETE.{plain}", {"seq": sequence})
        rig.drain()
        assert len(rig.copies(f"{plain}_T")) == 3098
        assert rig.row("SELECT first_sequence, last_sequence, reason FROM gaps") == {
            "first_sequence": 3010,
            "last_sequence": 3011,
            "reason": "deleted",
        }
