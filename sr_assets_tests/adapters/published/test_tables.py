"""The published tables: complete, atomically replaced, and confined for a user's SQL."""

import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from pyarrow import parquet

import sr_assets
from sr_assets.adapters.published import site_publishing
from sr_assets.adapters.published.actions import record_action
from sr_assets.adapters.published.catalog import COLUMN_TYPES, ROWS
from sr_assets.adapters.published.export import export_tables
from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.fleet_reader import count_rows, open_fleet, read_rows
from sr_assets.adapters.published.history import snapshot_rows
from sr_assets.adapters.published.manifest import is_published
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.published.stream_status import PublishedStream
from sr_assets.adapters.published.tables import TABLES, Table
from sr_assets.adapters.state.records import CopyState, StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.messages import Message
from sr_assets_tests.published import SITE, node_row, publish_message, publish_nodes
from sr_assets_tests.rig import in_background

SITES = ("LONDON", "PARIS")
STREAMS = (PublishedStream("S", "T", tracked=True), PublishedStream("PLAIN", "PLAIN", tracked=False))
#: The public tables and columns.
CONTRACT = {
    "topology_streams": "cluster domain stream storage replicas placement consumers messages bytes lost deleted leader as_of",
    "topology_links": "cluster stream kind origin_cluster origin_stream filter transforms active_seconds lag_messages"
    " lag_seconds error as_of",
    "topology_drift": "cluster stream key wanted found remedy",
    "last_seen_nodes": "name stream node first_seen last_seen last_copied last_sequence copied_bytes status status_since",
    "retired_nodes": "name stream node first_seen last_seen retired_at times_retired",
    "node_availability": "name stream node status status_since first_seen last_seen",
    "node_advisories": "event_id name stream node event event_time detected_at seen age_seconds previous transition late "
    "returned outage_seconds published_at epoch event_ns undone_at class suppressed_by announced_at",
    "node_snapshots": "name stream node sequence stored_at subject payload_bytes payload payload_raw metadata",
    "replication": "name stream source_stream source_created target_stream next_sequence source_last_sequence lag_messages "
    "lag_seconds seen_messages copied_messages copied_bytes skipped_messages too_old_messages no_sender_messages gap_messages "
    "parked_messages late_sightings watermark next_deadline last_error as_of queued_messages paused blind_seconds "
    "latency_p50_seconds latency_p95_seconds",
    "replication_partitions": "name stream partition next_sequence lag_messages watermark",
    "heartbeats": (
        "name stream subject originator sent_at stored_at arrived_at seconds p50_seconds p95_seconds max_seconds"
    ),
    "hops": "name stream copies p50_seconds p95_seconds max_seconds until",
    "gaps": "name stream first_sequence last_sequence messages reason noticed_at",
    "blind_spans": "name stream since until since_ns until_ns",
    "availability_daily": "date replicator name stream node up_seconds timeout_seconds retired_seconds blind_seconds "
    "transitions outages longest_outage_seconds final maintenance_seconds",
    "inventory_daily": "date name stream property value nodes came went all_nodes final",
    "parked_messages": "name stream sequence stored_at subject payload_bytes reason parked_at",
    "site_summary": "name stream nodes up timeout retired new_24h as_of",
    "node_events": "name stream node event event_time transitions published_at",
    "site_events": "name stream event event_time nodes silent since published_at",
    "snapshot_info": "as_of run_id schema_version generation role leader",
    "operator_actions": "at user host action subject detail",
    "site_leaders": "name role leader leader_host since checkpoint_at",
    "global_availability": "replicator name stream node status status_since last_seen event_time received_at source",
    "global_advisories": "event_id replicator name stream node event event_time received_at seen age_seconds previous "
    "transition late returned outage_seconds source feed epoch",
    "global_summary": "replicator name stream nodes up timeout retired new_24h last_advisory_at blind observer observer_alive_at "
    "watermark position lag_messages tracked_nodes as_of",
    "global_rejects": "feed sequence received_at subject payload_bytes reason field excerpt",
}


@pytest.fixture
def state(tmp_path: Path) -> Iterator[SiteState]:
    with SiteState(tmp_path / "sites" / "LONDON") as opened:
        with opened.transaction():
            opened.save_stream(StreamState("S", 7, 11, watermark_ns=86_400_000_000_000, as_of_ns=5))
            opened.save_stream(StreamState("PLAIN", 7, 1))
        yield opened


def test_missing_history_file_hides_only_its_rows(tmp_path: Path, state: SiteState) -> None:
    message = Message(3, 86_400_000_000_000, "s", b"", b"{}")
    ((rows, _),) = snapshot_rows([message], {3: "web1"})
    (tmp_path / "snapshots").mkdir()
    file, missing = tmp_path / "snapshots" / "3-4.parquet", tmp_path / "snapshots" / "4-5.parquet"
    parquet.write_table(rows, file)
    for node, sequence, path in (("web1", 3, file), ("web2", 4, missing)):
        relative = str(path.relative_to(tmp_path))
        state.connection.execute("INSERT INTO snapshots VALUES ('S', ?, ?, ?)", [node, sequence, relative])
    publish(tmp_path, state)
    with open_fleet(tmp_path) as fleet:
        assert fleet.execute("SELECT node, sequence FROM node_snapshots").fetchall() == [("web1", 3)]


def test_moved_home_shows_its_tables_at_the_new_path(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "it's new"
    publish_nodes(old)
    publish_message(old, "web1")
    assert is_published(old, SITE)
    old.rename(new)
    assert not is_published(new, SITE)
    for confined in (False, True):
        with open_fleet(new, confined=confined) as fleet:
            assert fleet.execute("SELECT node, sequence FROM node_snapshots").fetchall() == [("web1", 7)]
            assert fleet.execute("SELECT run_id FROM snapshot_info").fetchall() == [("run",)]
    publish_nodes(new)
    assert is_published(new, SITE)


def test_copied_home_shows_its_own_rows_while_the_original_changes(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "it's a [copy]"
    publish_nodes(old)
    publish_message(old, "web1")
    record_action(old, "pause", "S")
    shutil.copytree(old, new)
    before = {file: file.read_bytes() for file in new.rglob("*") if file.is_file()}
    record_action(old, "resume", "S")
    shutil.rmtree(old / "snapshots")
    expected = [("web1", 7, "pause")]
    query = "SELECT node, sequence, (SELECT string_agg(action) FROM operator_actions) FROM node_snapshot_history"
    with open_fleet(new) as fleet:
        assert fleet.execute(query).fetchall() == expected
    # Any program sees it by the variable; without it, it would see the original.
    with duckdb.connect(str(new / "fleet.duckdb"), read_only=True) as connection:
        connection.execute("SET VARIABLE sr_assets_home = ?", [str(new)])
        assert connection.execute(query).fetchall() == expected
    assert {file: file.read_bytes() for file in new.rglob("*") if file.is_file()} == before, "a reader has written"
    (file,) = (new / "snapshots").rglob("*.parquet")
    file.rename(file.with_name("2-3.parquet"))
    lacking = rf"node_snapshot_history lacks {file.relative_to(new)}; copy the home again, or use `sr-assets export`"
    with pytest.raises(RunError, match=lacking):
        sr_assets.read("node_snapshot_history", home=new)
    with pytest.raises(RunError, match=lacking):
        export_tables(new, str(tmp_path / "copies"), "parquet", ["node_snapshot_history"])
    file.with_name("2-3.parquet").unlink()
    with pytest.raises(RunError, match="copy the home again, or use `sr-assets export`"), open_fleet(new) as fleet:
        fleet.execute("SELECT * FROM node_snapshot_history").fetchall()


@pytest.mark.parametrize("folder", ("host=evil", "a=b", "node=x"))
def test_folder_that_looks_like_a_partition_changes_no_table(tmp_path: Path, folder: str) -> None:
    home = tmp_path / folder / "home"
    publish_nodes(home, node_row("web1", "up", 0))
    publish_message(home, "web1")
    record_action(home, "pause", "S")
    with open_fleet(home) as fleet:
        for table, columns in COLUMN_TYPES.items():
            if table in ROWS:
                assert fleet.table(table).columns == list(columns), table
        assert fleet.execute("SELECT host FROM operator_actions").fetchall() == [(socket.gethostname(),)]
        assert fleet.execute("SELECT name, stream, date::VARCHAR FROM node_snapshot_history").fetchall() == [
            (SITE, "REG", "2026-01-31")
        ]


def test_publication_is_consistent_while_copying_commits(
    tmp_path: Path, state: SiteState, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying = CopyState("S", 7)

    def park_one() -> None:
        copying.parked_messages += 1
        with state.second_connection() as other, other.transaction():
            other.save_copying(copying)
            other.add_rows("parked", pa.table({"stream": ["S"]}))

    class Interrupted(dict[str, Table]):
        """The tables; a batch parks a message between the publication of its counter and of its row."""

        def __getitem__(self, name: str) -> Table:
            if name == "parked_messages":
                park_one()
            return super().__getitem__(name)

    park_one()
    monkeypatch.setattr(site_publishing, "TABLES", Interrupted(TABLES))
    publish(tmp_path, state)
    assert copying.parked_messages == 2
    with open_fleet(tmp_path) as fleet:
        counter = fleet.execute("SELECT parked_messages FROM replication WHERE stream = 'S'").fetchone()
        assert counter == fleet.execute("SELECT count(*) FROM parked_messages").fetchone()


def publish(home: Path, state: SiteState, name: str = "LONDON", sites: tuple[str, ...] = SITES) -> None:
    publish_site(home, name, state, STREAMS, sites=sites, run=Run(1_500_000_000, "r"))


def test_published_tables_have_the_columns_of_the_contract(tmp_path: Path, state: SiteState) -> None:
    publish(tmp_path, state)
    with open_fleet(tmp_path) as fleet:
        for table, columns in CONTRACT.items():
            described = fleet.execute(f"DESCRIBE {table}").fetchall()
            names = [row[0] for row in described]
            assert names[: len(columns.split())] == columns.split()
            kinds = {row[0]: row[1] for row in described}
            times = {
                "first_seen",
                "last_seen",
                "event_time",
                "as_of",
                "watermark",
                "stored_at",
                "noticed_at",
                "parked_at",
            }
            assert {kinds[column] for column in times & kinds.keys()} <= {"TIMESTAMP WITH TIME ZONE"}
        (as_of,) = fleet.execute("SELECT as_of::VARCHAR FROM snapshot_info").fetchall()
        assert as_of == ("1970-01-01 00:00:01.5+00",)
    assert count_rows(tmp_path).keys() == CONTRACT.keys()


def test_site_replaces_its_own_rows_and_keeps_the_others(tmp_path: Path, state: SiteState) -> None:
    publish(tmp_path, state)
    publish(tmp_path, state, "PARIS")
    with state.transaction():
        state.save_stream(StreamState("S", 7, 21))
    publish(tmp_path, state)
    with open_fleet(tmp_path) as fleet:
        rows = fleet.execute("SELECT name, next_sequence FROM replication WHERE stream = 'S' ORDER BY name").fetchall()
        assert rows == [("LONDON", 21), ("PARIS", 11)]
        assert fleet.execute("SELECT count(*) FROM snapshot_info").fetchall() == [(1,)]
        assert fleet.execute("SELECT count(*) FROM site_summary").fetchall() == [(2,)]
    publish(tmp_path, state, sites=("LONDON",))
    with open_fleet(tmp_path) as fleet:
        assert fleet.execute("SELECT DISTINCT name FROM replication").fetchall() == [("LONDON",)]


@pytest.mark.parametrize("damage", ("missing", "garbage", "empty", "another database"))
def test_foreign_fleet_file_is_replaced_with_all_sites(tmp_path: Path, state: SiteState, damage: str) -> None:
    publish(tmp_path, state, "PARIS")
    publish(tmp_path, state)
    assert is_published(tmp_path, "PARIS")
    file = tmp_path / "fleet.duckdb"
    match damage:
        case "missing":
            file.unlink()
        case "garbage":
            file.write_bytes(b"x" * 5000)
        case "empty":
            file.write_bytes(b"")
        case _:
            with duckdb.connect(str(file)) as other:
                other.execute("CREATE TABLE mine (a INTEGER)")
    assert not is_published(tmp_path, "PARIS")
    publish(tmp_path, state)
    assert is_published(tmp_path, "PARIS")
    assert count_rows(tmp_path)["replication"] == 4


def test_drafts_of_an_interrupted_publication_are_deleted(tmp_path: Path, state: SiteState) -> None:
    (tmp_path / ".fleet.duckdb.new").write_bytes(b"half")
    (tmp_path / ".fleet.duckdb.new.wal").write_bytes(b"half")
    publish(tmp_path, state)
    assert not list(tmp_path.glob(".fleet*"))


def test_reader_never_sees_half_a_file(tmp_path: Path, state: SiteState) -> None:
    publish(tmp_path, state)
    ended = threading.Event()
    counts = set()

    def read() -> None:
        while not ended.is_set():
            with duckdb.connect(str(tmp_path / "fleet.duckdb"), read_only=True) as reader:
                counts.add(reader.execute("SELECT count(*) FROM replication").fetchall()[0])

    with in_background(read):
        try:
            for _ in range(10):
                publish(tmp_path, state)
        finally:
            ended.set()
    assert counts == {(2,)}


def test_confined_sql_can_only_read_the_tables(tmp_path: Path, state: SiteState) -> None:
    publish(tmp_path, state)
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    with open_fleet(tmp_path, confined=True) as fleet:
        assert read_rows(fleet, "SELECT count(*) AS n FROM replication").values == [(2,)]
        for query in (
            f"SELECT * FROM read_csv('{secret}')",
            f"SELECT * FROM '{secret}'",
            f"COPY replication TO '{tmp_path}/out.csv'",
            f"ATTACH '{tmp_path}/sites/LONDON/state.duckdb' AS s",
            "SET enable_external_access = true",
            "INSTALL httpfs",
            "CREATE TABLE x (a INTEGER)",
            "DELETE FROM replication",
            "SELECT 1; SELECT 2",
            "SELEKT",
            "",
        ):
            with pytest.raises(ConfigurationError) as raised:
                read_rows(fleet, query)
            assert "\n" not in str(raised.value)
    assert not (tmp_path / "out.csv").exists()


def test_open_fleet_names_the_remedy_when_nothing_is_readable(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nothing is published yet"), open_fleet(tmp_path):
        pass
    (tmp_path / "fleet.duckdb").write_bytes(b"x" * 5000)
    with pytest.raises(RunError, match="delete it"), open_fleet(tmp_path):
        pass


@pytest.mark.parametrize("folder", ("name=x", "date=2026-01-01"))
def test_home_inside_a_partition_of_the_same_column_is_refused(tmp_path: Path, folder: str) -> None:
    publish_nodes(tmp_path / folder, node_row("web1", "up", 0))
    assert sr_assets.read("last_seen_nodes", home=tmp_path / folder)["name"].to_list() == [SITE]
    with pytest.raises(ConfigurationError, match=f"is inside a folder {folder}, which is read as a column"):
        sr_assets.read("node_snapshot_history", home=tmp_path / folder)
