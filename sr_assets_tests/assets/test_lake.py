"""The lake as an asset: each message of the stream once, in any reader; and a line for whatever is in its way."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import pyarrow as pa
import pytest
from pyspark.sql.connect.plan import LogicalPlan

from sr_assets.adapters.locking import lock
from sr_assets.adapters.private import open_private, own_folder
from sr_assets.adapters.spark.run_session import HomeEngine, SparkConnection
from sr_assets.adapters.wire import Connection
from sr_assets.automation.jobs import LAKES
from sr_assets.definitions import build
from sr_assets.domain.errors import RunError
from sr_assets.domain.messages import Message, header_map
from sr_assets.settings import ClusterSettings, Settings
from sr_assets.stages.lake_filling import LOCK, LakeReport, fill
from sr_assets_tests.adapters.wire.rig import create_stream, outgoing, publish
from sr_assets_tests.rig import SITE, Rig, Sent, files_with
from sr_assets_tests.servers import NatsServer

DOCUMENT = (Path(__file__).parent.parent.parent / "docs" / "lake.md").read_text()
NODE = b"NATS/1.0\r\nNode: web1\r\nTag: a\r\nTag: \r\n\r\n"


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as opened:
        yield opened


def examples() -> dict[str, str]:
    """Return the examples of the document by a word that only one of them has."""
    found_blocks = re.findall(r"^```python lake\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    words = ("read_parquet('lake/NODES/*/*.parquet'", "SparkSession", "_spark_metadata")
    return {word: next(block for block in found_blocks if word in block) for word in words}


def expected(message: Message) -> dict[str, Any]:
    """Return the row of a message."""
    stored_at = datetime.fromtimestamp(message.stored_ns // 1000 / 1e6, UTC)
    headers = header_map(message.headers)
    return {
        "sequence": message.sequence,
        "stored_at": stored_at,
        "subject": message.subject,
        "headers": headers,
        "payload": message.payload,
        "sender": headers["Node"][0] if headers and "Node" in headers else None,
        "date": stored_at.date(),
    }


def rows(lake: Path) -> list[dict[str, Any]]:
    """Return the rows that DuckDB finds in the folders of a lake, in sequence order."""
    with duckdb.connect() as connection:
        query = f"FROM read_parquet('{lake}/*/*.parquet', hive_partitioning = true) ORDER BY sequence"
        table: pa.Table = connection.sql(query).to_arrow_table()
    rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    return rows


def fill_only(settings: Settings) -> LakeReport:
    """Fill the lake of the only stream, as its asset does."""
    (stream,) = settings.streams
    with closing(SparkConnection(HomeEngine(settings.spark, settings.home), None, f"{stream.label}/lake")) as spark:
        return fill(settings, stream, spark, "test")


@pytest.mark.nightly
def test_lake_is_filled_from_its_stream_after_another_had_the_path(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Connect server keeps the plans of a session, and each process numbers the parts of its plans from 0."""
    for payload in (b"first", b"second"):
        stream = rig.make()
        rig.entries[:] = []
        rig.add(stream, lake={"path": "lake"})
        rig.publish(stream, [Sent(payload)])
        shutil.rmtree(rig.home / "lake", ignore_errors=True)
        monkeypatch.setattr(LogicalPlan, "_nextPlanId", 0)
        assert fill_only(rig.settings()).rows == 1
        assert [row["payload"] for row in rows(rig.home / "lake")] == [payload]


def failure(settings: Settings) -> str:
    """Fill a lake that fails, and return the error, which must be one line."""
    with pytest.raises(RunError) as raised:
        fill_only(settings)
    assert "\n" not in str(raised.value)
    assert "Traceback" not in str(raised.value)
    return str(raised.value)


def test_lake_holds_each_message_of_the_stream_once(
    rig: Rig, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = rig.make()
    lake = {"path": "lake/NODES", "partition_by": ["date"], "options": {"compression": "zstd"}}
    rig.add(stream, inspect_header="Node", inspect_duration="1h", batch_messages=10, catch_up_messages=10, lake=lake)
    rig.publish(stream, [Sent(bytes(range(256)), "a", NODE), *(Sent(b"%d" % n, f"s{n % 2}") for n in range(2, 25))])
    rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 5})
    settings = rig.settings()
    job, key, folder = (
        build(settings).resolve_job_def(LAKES),
        dg.AssetKey([SITE, stream, "lake"]),
        rig.home / "lake/NODES",
    )

    def materialise() -> tuple[dict[str, Any], bool]:
        """Return the metadata, and whether the check passed."""
        result = job.execute_in_process(instance=instance, raise_on_error=False)
        assert result.success
        (event,) = result.get_asset_materialization_events()
        (check,) = result.get_asset_check_evaluations()
        metadata = event.materialization.metadata
        assert event.asset_key == check.asset_key == key
        return {name: metadata[name].value for name in ("rows", "position", "lost", "behind", "path")}, check.passed

    done = {"position": 25, "lost": 0, "behind": 0, "path": str(folder)}
    assert materialise() == ({"rows": 23, **done}, True)
    stored = rig.stored(stream)
    assert rows(folder) == [expected(message) for message in stored]
    assert rows(folder)[0]["headers"] == {"Node": ["web1"], "Tag": ["a", ""]}
    assert [path.name[:5] for path in folder.iterdir() if path.name[0] != "_"] == ["date="]
    before = sorted(folder.glob("*/*.parquet"))
    assert materialise() == ({"rows": 0, **done}, True)
    assert sorted(folder.glob("*/*.parquet")) == before
    # Messages that expire unread are counted, and the rest is appended.
    rig.publish(stream, [Sent(b"%d" % n) for n in range(25, 31)])
    rig.api(f"STREAM.PURGE.{stream}", {"seq": 28})
    assert materialise() == ({"rows": 3, **done, "position": 31, "lost": 3}, False)
    assert rows(folder) == [expected(message) for message in (*stored, *rig.stored(stream))]
    assert set(before) < set(folder.glob("*/*.parquet"))
    monkeypatch.chdir(rig.home)
    code = examples()
    for word in ("read_parquet('lake/NODES/*/*.parquet'", "_spark_metadata"):
        exec(compile(code[word], "docs/lake.md", "exec"), {})
        assert "26" in capsys.readouterr().out
    engine = HomeEngine(settings.spark, settings.home)
    with engine.opened() as session:
        assert session.read.parquet(str(folder)).count() == 26


def test_lake_of_another_stream_is_refused(rig: Rig) -> None:
    stream = rig.make()
    entry = rig.add(stream, lake={"path": "lake"})
    rig.publish(stream, [Sent(b"x")] * 3)
    assert fill_only(rig.settings()).rows == 3
    before = rows(rig.home / "lake")
    entry["stream"] = rig.make()
    refused = failure(rig.settings())
    assert refused.startswith(f"{SITE}/{entry['stream']}: lake {rig.home / 'lake'}: stream {entry['stream']} on ")
    assert (
        "is not the stream of the lake: it was recreated, or the lake belongs to another stream; set another" in refused
    )
    assert rows(rig.home / "lake") == before
    # A rolled-back source: the stream ends before the position.
    (checkpoint,) = (rig.home / "lake/_checkpoint/offsets").glob("[0-9]*")
    created_ns = rig.info(entry["stream"]).created_ns
    checkpoint.write_text(re.sub(r'"created_ns": \d+', f'"created_ns": {created_ns}', checkpoint.read_text()))
    checkpoint.with_name(f".{checkpoint.name}.crc").unlink()
    rig.publish(entry["stream"], [Sent(b"x")])
    assert "ends at 1, before the position 4 of the lake: it was rolled back" in failure(rig.settings())


def foreign_files(folder: Path) -> str:
    (folder / "date=2026-01-01").mkdir(parents=True)
    (folder / "date=2026-01-01" / "mine.parquet").write_bytes(b"")
    return str(folder)


def file_in_the_way(folder: Path) -> str:
    folder.write_bytes(b"")
    return str(folder)


@pytest.mark.parametrize(
    ("path_of", "file_format", "line"),
    (
        (foreign_files, "parquet", "the folder holds files that no lake has written; set another lake.path"),
        (file_in_the_way, "parquet", "cannot be written (File exists); free some space or fix the permissions"),
        (str, "nosuch", "Failed to find the data source: nosuch."),
        ("s3a://bucket/{0.name}".format, "parquet", "S3AFileSystem not found; add the package of this file system"),
        ("file:/proc/{0.name}".format, "parquet", "failed; permit writing there, or set another lake.path"),
    ),
    ids=("foreign files", "not a folder", "unknown format", "unknown file system", "read-only"),
)
def test_unusable_lake_is_one_line(
    rig: Rig, tmp_path: Path, path_of: Callable[[Path], str], file_format: str, line: str
) -> None:
    path = path_of(tmp_path / "lake")
    rig.add(rig.make(), lake={"path": path, "format": file_format})
    refused = failure(rig.settings())
    assert path in refused
    assert line in refused


def test_lake_on_a_cluster_needs_a_url(rig: Rig) -> None:
    rig.spark = {"mode": "sc://localhost:1"}
    rig.add(rig.make(), lake={"path": "lake"})
    with pytest.raises(
        Exception, match="is a folder of this host, which the cluster does not share; use a URL such as"
    ):
        fill_only(rig.settings())


def test_second_run_of_a_lake_is_refused(rig: Rig, instance: dg.DagsterInstance) -> None:
    stream = rig.make()
    rig.add(stream, lake={"path": "lake"})
    settings = rig.settings()
    schedule = build(settings).resolve_schedule_def("hourly_lakes")
    folder = rig.home / "sites" / SITE
    own_folder(folder)
    with open_private(folder / LOCK.format(stream)) as file:
        assert lock(file)
        assert "lake is under way: an unknown process; wait for its end" in failure(settings)
        skipped = schedule.evaluate_tick(dg.build_schedule_context(instance=instance))
        assert skipped.skip_message == f"a run fills the lake of {SITE}/{stream}"
    requested = schedule.evaluate_tick(dg.build_schedule_context(instance=instance))
    assert len(requested.run_requests or ()) == 1


def test_login_of_the_source_is_in_no_file(rig: Rig, tmp_path: Path) -> None:
    users = "authorization {users: [{user: me, password: hunter2}]}"
    with NatsServer(tmp_path / "secured", "secured", config=users) as server:
        rig.add("SECURED", source_url=f"nats://me:hunter2@{server.address}", lake={"path": str(tmp_path / "lake")})
        assert "stream SECURED does not exist" in failure(rig.settings())
        with Connection(ClusterSettings((server.address,), user="me", password="hunter2")) as connection:
            publish(connection, outgoing(create_stream(connection, "SECURED"), 5))
        assert fill_only(rig.settings()).rows == 5
        (rig.home / "replication.yaml").unlink()
        assert files_with("hunter2", tmp_path / "lake", rig.home) == []
