"""Reading a range as rows: its parts in order, repeatable reads, and plans without secrets."""

import contextlib
import io
import json
import pickle
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sr_assets.adapters.connection_file import open_connection, write_connection
from sr_assets.adapters.range_rows import Advisories, RangeRead, RowKind, Sightings
from sr_assets.adapters.spark.jobs import ReadWork, read_in_tasks
from sr_assets.adapters.spark.session import leave_session, open_session
from sr_assets.adapters.spark.tasks import _task_of
from sr_assets.adapters.wire import Connection
from sr_assets.domain.classes import ClassRule
from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.received import SitePath
from sr_assets.domain.senders import HeaderName, JsonField, SubjectToken
from sr_assets.settings import ClusterSettings, SparkSettings
from sr_assets_tests.adapters.wire.rig import ODD_HEADERS, create_stream, outgoing, publish
from sr_assets_tests.rig import SITE, Rig, Sent
from sr_assets_tests.servers import NatsServer

WHOLE = SequenceRange(1, 101)
BY_HEADER = Sightings(HeaderName("Node"))


@pytest.fixture
def stored(rig: Rig, tmp_path: Path) -> RangeRead:
    """A read of a stream of 100 messages without 10 to 19."""
    stream = rig.make()
    rig.publish(stream, [Sent(b'{"sender": "n%d", "force": true}' % n, f"s{n % 2}") for n in range(1, 101)])
    for sequence in range(10, 20):
        rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    connection = str(write_connection(tmp_path / "c.json", ClusterSettings((rig.source.address,))))
    return RangeRead(connection, stream, BY_HEADER, direct=True)


def read(reader: RangeRead, wanted: SequenceRange = WHOLE, parts: int = 1) -> list[dict[str, Any]]:
    return [row for part in wanted.split(parts) for row in reader.table(part).to_pylist()]


@pytest.mark.parametrize("direct", (True, False))
@pytest.mark.parametrize("parts", (1, 3, 200))
def test_parts_cover_range_once_in_order(stored: RangeRead, parts: int, *, direct: bool) -> None:
    reader, wanted = replace(stored, direct=direct), SequenceRange(5, 91)
    rows = read(reader, wanted, parts)
    assert [row["sequence"] for row in rows] == [*range(5, 10), *range(20, 91)]
    assert read(reader, wanted, parts) == rows


@pytest.mark.parametrize("direct", (True, False))
def test_filter_excludes_other_subjects(stored: RangeRead, *, direct: bool) -> None:
    rows = read(replace(stored, direct=direct, filter_subject=f"{stored.stream}.s1"))
    assert [row["sequence"] for row in rows] == [n for n in range(1, 101, 2) if not 10 <= n < 20]


def test_sightings_contain_sender_and_size_without_payload(stored: RangeRead) -> None:
    kind = Sightings(JsonField("sender"), ("force",))
    rows = read(replace(stored, kind=kind), SequenceRange(1, 3))
    assert [row | {"stored_ns": 0} for row in rows] == [
        {"sequence": n, "stored_ns": 0, "sender": f"n{n}", "payload_bytes": 31, "forced": True} for n in (1, 2)
    ]


def create_random_stream(rig: Rig, random: Random) -> tuple[str, dict[int, Sent]]:
    """Create a stream of messages with odd headers and various sizes, delete some, and return the remaining ones."""
    stream = rig.make()
    headers = (
        *ODD_HEADERS,
        b"NATS/1.0\r\nNode: a\r\n\r\n",
        b"NATS/1.0\r\nNode: \xc3\xa4\r\nNats-Msg-Size: 7\r\n\r\n",
        b"NATS/1.0\r\nNats-Msg-Size: 3\r\n\r\n",
        b"NATS/1.0\r\nNode: cut off",
        b"NATS/1.0\r\nNode: a\r\nChoria-SR-Subject: x\r\n\r\n",
    )
    sizes = (0, 1, 100, 9_000)
    sent = [
        Sent(random.randbytes(random.choice(sizes)), f"{random.randrange(3)}.x", random.choice(headers))
        for _ in range(300)
    ]
    rig.publish(stream, sent)
    first = random.choice((1, 1, 40))
    rig.api(f"STREAM.PURGE.{stream}", {"seq": first})
    deleted = set(random.sample(range(first, 301), random.choice((0, 5, 120))))
    for sequence in deleted:
        rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    return stream, {n: message for n, message in enumerate(sent, 1) if n >= first and n not in deleted}


@pytest.mark.parametrize("seed", range(4))
def test_sightings_are_equal_when_only_headers_are_read(rig: Rig, stored: RangeRead, seed: int) -> None:
    random = Random(seed)
    stream, remaining = create_random_stream(rig, random)
    for extractor in (HeaderName("Node"), HeaderName("Nats-Msg-Size"), SubjectToken(2)):
        first, after = sorted(random.sample(range(1, 302), 2))
        wanted, parts = SequenceRange(first, after), random.choice((1, 3))
        reader = RangeRead(
            stored.connection, stream, Sightings(extractor), direct=True, batch_bytes=random.choice((3000, 100000))
        )
        for direct in (True, False):
            for subject in (None, "1"):
                variant = replace(reader, direct=direct, filter_subject=f"{stream}.{subject}.>" if subject else None)
                expected = read(variant, wanted, parts)
                assert [(row["sequence"], row["payload_bytes"]) for row in expected] == [
                    (n, len(message.payload))
                    for n, message in remaining.items()
                    if first <= n < after and message.subject[0] == (subject or message.subject[0])
                ]
                assert read(replace(variant, headers_only=True), wanted, parts) == expected


def test_whole_messages_are_read_when_consumers_are_refused(rig: Rig, stored: RangeRead, tmp_path: Path) -> None:
    full = rig.make(max_consumers=1)
    rig.api(
        f"CONSUMER.CREATE.{full}.other", {"stream_name": full, "config": {"name": "other", "durable_name": "other"}}
    )
    denied = '{user: me, password: p, permissions: {publish: {deny: ["$JS.API.CONSUMER.CREATE.>"]}}}'
    with NatsServer(tmp_path / "strict", "strict", config=f"authorization {{ users: [{denied}] }}") as server:
        strict = ClusterSettings((server.address,), user="me", password="p")
        with Connection(strict) as connection:
            stream = create_stream(connection, "DENIED")
            publish(connection, outgoing(stream, 50))
        rig.publish(full, [Sent(b"x" * n) for n in range(1, 51)])
        file = str(write_connection(tmp_path / "strict.json", strict))
        wanted = SequenceRange(1, 51)
        for reader, error in (
            (replace(stored, stream=full), "maximum consumers limit"),
            (replace(stored, stream=stream, connection=file), "CONSUMER.CREATE"),
        ):
            rows = read(replace(reader, headers_only=True), wanted)
            assert len(rows) == 50
            assert rows == read(reader, wanted)
            with pytest.raises(RunError, match=error):
                read(replace(reader, headers_only=True, direct=False), wanted)


@pytest.mark.parametrize(
    "kind",
    (
        Sightings(JsonField(r"a.b\.c.0"), ("a", "b.c")),
        Sightings(SubjectToken(-1), None, (ClassRule("db", ("db*",)), ClassRule("web", path=("role",), value="web"))),
        Advisories((SitePath("R", "S", ("a.>",), ("R/S",)),)),
    ),
)
def test_kind_of_rows_reaches_tasks(kind: RowKind) -> None:
    assert pickle.loads(pickle.dumps(kind)) == kind


def test_credentials_are_in_private_file_and_not_in_plans(rig: Rig, stored: RangeRead, tmp_path: Path) -> None:
    cluster = ClusterSettings((rig.source.address,), user="me", password="hunter2")
    file = write_connection(tmp_path / "deep" / "c.json", cluster)
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(file.read_text())["password"] == "hunter2"
    assert write_connection(file, ClusterSettings((rig.source.address,), user="me", password="other")) == file
    assert json.loads(file.read_text())["password"] == "other"
    write_connection(file, cluster)
    with open_connection(str(file), "test"):
        pass
    reader = replace(stored, connection=str(file))
    spark = open_session(SparkSettings(), rig.home, SITE)
    try:
        printed = io.StringIO()
        work = ReadWork(reader, tuple(WHOLE.split(2)))
        with contextlib.redirect_stdout(printed):
            spark.range(2).mapInArrow(_task_of(work), work.schema).explain(extended=True)
        assert "sequence" in printed.getvalue()
        assert "hunter2" not in printed.getvalue()
        for remote in (False, True):
            rows = read_in_tasks(spark, reader, WHOLE, 2, remote=remote)
            assert rows.sort_by("sequence").to_pylist() == read(reader)
    finally:
        leave_session(spark)
