"""`export`: copies of the tables that need no other file, written again only where rows have changed."""

import fcntl
import json
import os
import re
import shutil
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import duckdb
import polars as pl
import pytest

from sr_assets.adapters.published.actions import record_action
from sr_assets.adapters.published.catalog import COLUMN_TYPES, ROWS
from sr_assets.adapters.published.compaction import describe
from sr_assets.adapters.published.daily_tables import AVAILABILITY
from sr_assets.adapters.published.export import Exported, export_tables
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets_tests.published import NOW_NS, SITE, STREAM, node_row, publish_message, publish_nodes
from sr_assets_tests.rig import in_background, wait_until

DAYS = [date(2026, 1, 30), date(2026, 1, 31)]
HISTORY = "node_snapshot_history"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with two nodes, a message, an action, and two days of availability."""
    home = tmp_path / "it's home [1]"
    publish_nodes(home, node_row("web1", "up", 0), node_row("web2", "retired", 5))
    publish_message(home, "web1")
    record_action(home, "pause", "london/REG")
    write_days(home, DAYS)
    return home


def write_days(home: Path, days: list[date]) -> None:
    columns = ", ".join(f"NULL::{kind} AS {name}" for name, kind in AVAILABILITY.kinds.items() if name != "date")
    rows = " UNION ALL ".join(f"SELECT DATE '{day}' AS date, {columns}" for day in days)
    with duckdb.connect() as connection:
        AVAILABILITY.write_days(connection, home, rows, days, 0o600)


def test_duckdb_file_has_every_table_and_needs_no_other_file(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "copy.duckdb"
    export_tables(home, str(file), "duckdb")
    home.rename(tmp_path / "gone")
    with duckdb.connect(str(file), read_only=True) as copy:
        assert {name for (name,) in copy.execute("SHOW TABLES").fetchall()} == ROWS.keys() - {HISTORY}
        assert copy.execute("SELECT node FROM last_seen_nodes").fetchall() == [("web1",)]
        assert copy.execute("SELECT count(*) FROM duckdb_views() WHERE NOT internal").fetchall() == [(0,)]
    with pytest.raises(RunError, match="already exists"):
        export_tables(tmp_path / "gone", str(file), "duckdb")
    with pytest.raises(RunError, match="cannot be written"):
        export_tables(tmp_path / "gone", str(tmp_path / "no" / "copy.duckdb"), "duckdb")


@pytest.mark.parametrize("url", (False, True), ids=("path", "url"))
def test_parquet_has_each_table_with_its_rows_for_any_reader(home: Path, tmp_path: Path, *, url: bool) -> None:
    target = tmp_path / "copies"
    export_tables(home, f"file://{target}" if url else str(target), "parquet", [*ROWS])
    listed = json.loads((target / "tables.json").read_text())["tables"]
    assert listed.keys() == ROWS.keys()
    assert {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()} == {
        "tables.json",
        *(file for table in listed.values() for file in table["files"]),
    }
    with open_fleet(home) as fleet:
        for table in ROWS:
            if not listed[table]["files"]:
                assert table == "inventory_daily"
                continue
            frame = pl.read_parquet([target / file for file in listed[table]["files"]], hive_partitioning=False)
            assert frame.columns == list(COLUMN_TYPES[table])
            assert frame.height == fleet.table(table).count("*").fetchall()[0][0], table
    assert listed["availability_daily"]["files"] == [f"availability_daily/date={day}/rows.parquet" for day in DAYS]
    message = pl.read_parquet(target / "node_snapshots" / "rows.parquet").row(0, named=True)
    assert json.loads(message["payload"]) == {"sender": "somebody"}
    assert pl.read_parquet(target / "operator_actions" / "rows.parquet")["operator"].len() == 1


def test_only_files_whose_rows_have_changed_are_written_again(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "copies"

    def copy(*tables: str) -> Exported:
        return export_tables(home, str(target), "parquet", tables)

    names = ("last_seen_nodes", "retired_nodes", "availability_daily", "operator_actions", HISTORY)
    assert copy(*names) == Exported(5, 6, 0)
    assert copy(*names) == Exported(5, 0, 6)
    record_action(home, "resume", "london/REG")
    publish_nodes(home, node_row("web3", "up", 0), sequence=9)
    assert copy(*names) == Exported(5, 2, 4)
    assert nodes_of(target) == ["web1", "web3"]
    write_days(home, DAYS[1:])
    os.utime(home / "availability" / f"{DAYS[1]}.parquet", ns=(NOW_NS, NOW_NS))
    assert copy("availability_daily") == Exported(1, 1, 1)
    # A day that expires stays in the copy; a deleted copy is written again.
    (home / "availability" / f"{DAYS[0]}.parquet").unlink()
    (target / "retired_nodes" / "rows.parquet").unlink()
    assert copy(*names) == Exported(5, 1, 4)
    listed = json.loads((target / "tables.json").read_text())["tables"]
    assert len(listed["availability_daily"]["files"]) == len(DAYS)


def test_file_of_a_failed_export_is_written_again(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "csv"
    since_ns, tables = NOW_NS * 2, ["operator_actions", "topology_drift"]
    export_tables(home, str(target), "csv", tables, since_ns)
    (target / "topology_drift.csv").unlink()
    (target / "topology_drift.csv").mkdir()
    with pytest.raises(RunError, match="cannot be written"):
        export_tables(home, str(target), "csv", tables)
    (target / "topology_drift.csv").rmdir()
    assert pl.read_csv(target / "operator_actions.csv").height == 1
    (target / ".gaps.csv.new").write_text("left by a killed export")
    assert export_tables(home, str(target), "csv", tables, since_ns) == Exported(2, 2, 0)
    assert pl.read_csv(target / "operator_actions.csv").height == 0
    assert not list(target.glob(".*"))


def test_exports_into_one_folder_take_turns(home: Path, tmp_path: Path) -> None:
    target = tmp_path / "copies"
    target.mkdir()
    another = os.open(target, os.O_RDONLY)
    fcntl.flock(another, fcntl.LOCK_EX)
    waiting = re.compile(rf"-> FLOCK .*:{target.stat().st_ino} ")
    with in_background(lambda: export_tables(home, str(target), "parquet", ["last_seen_nodes"])):
        wait_until(lambda: bool(waiting.search(Path("/proc/locks").read_text())), "the export to wait for its turn")
        assert not list(target.iterdir())
        publish_nodes(home, node_row("web3", "up", 0), sequence=9)
        os.close(another)
    assert nodes_of(target) == ["web1", "web3"]


def test_rows_of_an_interrupted_publication_are_not_taken_for_the_next(home: Path, tmp_path: Path) -> None:
    file, target = home / "fleet.duckdb", tmp_path / "copies"
    before = file.read_bytes()
    publish_nodes(home, node_row("web3", "up", 0), sequence=9)
    after = file.read_bytes()
    # The list of publications is written first.
    for content, nodes in ((before, ["web1"]), (after, ["web1", "web3"])):
        file.write_bytes(content)
        export_tables(home, str(target), "parquet", ["last_seen_nodes"])
        assert nodes_of(target) == nodes


def test_day_of_the_history_keeps_its_rows_while_it_expires(home: Path, tmp_path: Path) -> None:
    target, (day,) = tmp_path / "copies", (home / "snapshots").rglob("date=*")
    files = [day / f"{first}-{first + 1}.parquet" for first in (20, 30)]
    (message,) = day.glob("*.parquet")
    with SiteState(home / "sites" / SITE) as state:
        for file in files:
            shutil.copy(message, file)
            with state.transaction():
                state.snapshot_index(STREAM).add(int(file.name[:2]), int(file.name[:2]) + 1, [describe(file)])
    publish_nodes(home, sequence=40)

    def copy() -> tuple[Exported, int]:
        done = export_tables(home, str(target), "parquet", [HISTORY])
        return done, pl.read_parquet(target / HISTORY / f"{day.name}" / "rows.parquet").height

    assert copy() == (Exported(1, 1, 0), 3)
    files[0].unlink()
    assert copy() == (Exported(1, 0, 1), 3)


def nodes_of(target: Path) -> list[str]:
    return pl.read_parquet(target / "last_seen_nodes" / "rows.parquet")["node"].sort().to_list()


def test_since_selects_rows_and_days(home: Path, tmp_path: Path) -> None:
    since_ns = int(datetime(2026, 1, 31, 18, tzinfo=UTC).timestamp()) * 10**9
    export_tables(home, str(tmp_path / "csv"), "csv", ["availability_daily", "last_seen_nodes"], since_ns)
    days = pl.read_csv(tmp_path / "csv" / "availability_daily.csv")["date"].to_list()
    assert days == ["2026-01-31"]
    assert pl.read_csv(tmp_path / "csv" / "last_seen_nodes.csv")["last_seen"].to_list() == ["2026-01-31 12:00:00+00"]
    export_tables(
        home, str(tmp_path / "parquet"), "parquet", ["availability_daily", HISTORY, "operator_actions"], since_ns
    )
    files = sorted(str(file.relative_to(tmp_path / "parquet")) for file in (tmp_path / "parquet").rglob("*.parquet"))
    assert files == [
        "availability_daily/date=2026-01-31/rows.parquet",
        "node_snapshot_history/date=2026-01-31/rows.parquet",
        "operator_actions/rows.parquet",
    ]
    tomorrow_ns = int((datetime.now(UTC) + timedelta(days=1)).timestamp()) * 10**9
    export_tables(home, str(tmp_path / "parquet"), "parquet", ["operator_actions"], tomorrow_ns)
    assert pl.read_parquet(tmp_path / "parquet" / "operator_actions" / "rows.parquet").is_empty()


def test_export_refuses_in_one_line(home: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"no table 'last_seen' is published; did you mean 'last_seen_nodes'\?"
    ):
        export_tables(home, str(tmp_path / "copies"), "parquet", ["last_seen"])
    with pytest.raises(ConfigurationError, match="the target is empty"):
        export_tables(home, "", "csv")
    with pytest.raises(ConfigurationError, match="a DuckDB file is local"):
        export_tables(home, "s3://bucket/folder", "duckdb")
    with pytest.raises(ConfigurationError, match="contains '@', as with a login") as refused:
        export_tables(home, "s3://key:hid/den@bucket/folder", "parquet")
    assert "den" not in str(refused.value)
    export_tables(home, str(tmp_path / "csv"), "csv")
    with pytest.raises(ConfigurationError, match="is not of an export as parquet"):
        export_tables(home, str(tmp_path / "csv"), "parquet")
    (tmp_path / "file").write_text("")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "tables.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=r"tables.json is not of an export as parquet; choose another folder"):
        export_tables(home, str(tmp_path / "foreign"), "parquet")
    for target in (str(tmp_path / "file"), "nowhere://bucket/folder"):
        with pytest.raises(RunError, match="cannot be written") as error:
            export_tables(home, target, "parquet")
        assert "\n" not in str(error.value)
    # The home's own list of files is not of an export.
    with pytest.raises(ConfigurationError, match="is not of an export"):
        export_tables(home, str(home), "parquet")


def test_home_lists_the_files_of_each_table_for_any_reader(home: Path) -> None:
    listed = json.loads((home / "tables.json").read_text())
    assert "/" not in "".join(file[0] for table in listed["tables"].values() for file in table["files"])
    frame = pl.read_parquet([home / file for file in listed["tables"]["last_seen_nodes"]["files"]], glob=False)
    assert frame["node"].to_list() == ["web1"]
    assert listed["as_of"] == "2026-01-31T12:00:00+00:00"
