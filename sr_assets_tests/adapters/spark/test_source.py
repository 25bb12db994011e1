"""The source: the partitions of a range, repeatable reads, and plans without secrets."""

import contextlib
import io
import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sr_assets.adapters.connection_file import open_connection, write_connection
from sr_assets.adapters.spark.data_source import FORMAT, JetStreamReader, decode_extractor, encode_extractor
from sr_assets.adapters.spark.session import leave_session, open_session
from sr_assets.adapters.wire import Connection
from sr_assets.domain.errors import RunError
from sr_assets.domain.senders import HeaderName, JsonField, SenderExtractor, SubjectToken
from sr_assets.settings import ClusterSettings, SparkSettings
from sr_assets_tests.adapters.wire.rig import ODD_HEADERS, create_stream, outgoing, publish
from sr_assets_tests.rig import SITE, Rig, Sent
from sr_assets_tests.servers import NatsServer

Options = Callable[..., dict[str, str]]


@pytest.fixture
def options(rig: Rig, tmp_path: Path) -> Options:
    """A function that returns the options to read a stream of 100 messages, of which 10 to 19 are deleted."""
    stream = rig.make()
    rig.publish(stream, [Sent(b'{"sender": "n%d", "force": true}' % n, f"s{n % 2}") for n in range(1, 101)])
    for sequence in range(10, 20):
        rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})
    connection = str(write_connection(tmp_path / "c.json", ClusterSettings((rig.source.address,))))

    def build(**more: str) -> dict[str, str]:
        return {"connection": connection, "stream": stream, "first": "1", "next": "101", "direct": "true"} | more

    return build


def read(options: dict[str, str]) -> list[dict[str, Any]]:
    reader = JetStreamReader(options)
    batches = chain.from_iterable(reader.read(partition) for partition in reader.partitions())
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("direct", ("true", "false"))
@pytest.mark.parametrize("partitions", ("1", "3", "200"))
def test_partitions_cover_range_once_in_order(options: Options, direct: str, partitions: str) -> None:
    selected = options(direct=direct, partitions=partitions, first="5", next="91")
    rows = read(selected)
    assert [row["sequence"] for row in rows] == [*range(5, 10), *range(20, 91)]
    assert read(selected) == rows


@pytest.mark.parametrize("direct", ("true", "false"))
def test_filter_excludes_other_subjects(options: Options, direct: str) -> None:
    selected = options(direct=direct)
    rows = read(selected | {"filter": f"{selected['stream']}.s1"})
    assert [row["sequence"] for row in rows] == [n for n in range(1, 101, 2) if not 10 <= n < 20]


def test_sightings_contain_sender_and_size_without_payload(options: Options) -> None:
    rows = read(options(inspect=encode_extractor(JsonField("sender"), ("force",)), next="3"))
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
def test_sightings_are_equal_when_only_headers_are_read(rig: Rig, options: Options, seed: int) -> None:
    random = Random(seed)
    stream, remaining = create_random_stream(rig, random)
    for extractor in (HeaderName("Node"), HeaderName("Nats-Msg-Size"), SubjectToken(2)):
        first, after = sorted(random.sample(range(1, 302), 2))
        selected = options(
            stream=stream,
            inspect=encode_extractor(extractor, None),
            first=str(first),
            next=str(after),
            partitions=random.choice(("1", "3")),
            batch_bytes=random.choice(("3000", "100000")),
        )
        for direct in ("true", "false"):
            for subject in (None, "1"):
                variant = selected | {"direct": direct} | ({"filter": f"{stream}.{subject}.>"} if subject else {})
                expected = read(variant)
                assert [(row["sequence"], row["payload_bytes"]) for row in expected] == [
                    (n, len(message.payload))
                    for n, message in remaining.items()
                    if first <= n < after and message.subject[0] == (subject or message.subject[0])
                ]
                assert read(variant | {"headers_only": "true"}) == expected


def test_whole_messages_are_read_when_consumers_are_refused(rig: Rig, options: Options, tmp_path: Path) -> None:
    by_header = encode_extractor(HeaderName("Node"), None)
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
        for selected, error in (
            (options(stream=full, inspect=by_header, next="51"), "maximum consumers limit"),
            (options(stream=stream, inspect=by_header, next="51", connection=file), "CONSUMER.CREATE"),
        ):
            rows = read(selected | {"headers_only": "true"})
            assert len(rows) == 50
            assert rows == read(selected)
            with pytest.raises(RunError, match=error):
                read(selected | {"headers_only": "true", "direct": "false"})


@pytest.mark.parametrize("extractor", (JsonField(r"a.b\.c.0"), HeaderName("Node"), SubjectToken(-1)))
@pytest.mark.parametrize("force", (None, ("a", "b.c")))
def test_extractor_survives_encoding_as_an_option(extractor: SenderExtractor, force: tuple[str, ...] | None) -> None:
    assert decode_extractor(encode_extractor(extractor, force)) == (extractor, force)


def test_credentials_are_in_private_file_and_not_in_plans(rig: Rig, options: Options, tmp_path: Path) -> None:
    cluster = ClusterSettings((rig.source.address,), user="me", password="hunter2")
    file = write_connection(tmp_path / "deep" / "c.json", cluster)
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(file.read_text())["password"] == "hunter2"
    assert write_connection(file, ClusterSettings((rig.source.address,), user="me", password="other")) == file
    assert json.loads(file.read_text())["password"] == "other"
    write_connection(file, cluster)
    with open_connection(str(file), "test"):
        pass
    spark = open_session(SparkSettings(), rig.home, SITE)
    try:
        frame = spark.read.format(FORMAT).options(**options(connection=str(file), partitions="2")).load()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            frame.explain(extended=True)
        assert "sequence" in printed.getvalue()
        assert "hunter2" not in printed.getvalue()
        assert frame.count() == 90
    finally:
        leave_session(spark)
