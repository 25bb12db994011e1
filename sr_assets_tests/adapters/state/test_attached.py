"""An instance of DuckDB opens one file after another, and keeps nothing of an earlier one."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from sr_assets.adapters.state import cached_connection
from sr_assets.adapters.state.cached_connection import AttachedFile
from sr_assets_tests.rig import PATIENCE_SECONDS


@pytest.fixture(autouse=True)
def idle() -> Iterator[list[duckdb.DuckDBPyConnection]]:
    """The idle instances, none at first."""
    before = list(cached_connection._idle)
    cached_connection._idle.clear()
    yield cached_connection._idle
    cached_connection._idle[:] = before


def test_instance_opens_the_next_file_and_forgets_the_last(
    tmp_path: Path, idle: list[duckdb.DuckDBPyConnection]
) -> None:
    with AttachedFile(tmp_path / "it's.duckdb") as first:
        first.main.execute("CREATE TABLE t AS SELECT 1 AS a")
        first.main.execute("CREATE TEMP TABLE own AS SELECT 2 AS a")
        first.main.execute("SET TimeZone = 'Asia/Tokyo'")
    (instance,) = idle
    with AttachedFile(tmp_path / "next.duckdb") as other:
        assert (other._instance, idle) == (instance, [])
        assert other.main.execute("SHOW ALL TABLES").fetchall() == []
        assert other.connect().execute("SELECT current_setting('TimeZone')").fetchall() == [("UTC",)]
        with duckdb.connect(str(tmp_path / "it's.duckdb")) as closed:
            assert closed.execute("FROM t").fetchall() == [(1,)]


def test_file_closes_after_an_open_and_a_failed_transaction(
    tmp_path: Path, idle: list[duckdb.DuckDBPyConnection]
) -> None:
    with AttachedFile(tmp_path / "state.duckdb") as file:
        file.main.execute("CREATE TABLE t (a INTEGER)")
        other = file.connect()
        other.execute("BEGIN; INSERT INTO t VALUES (1)")
        file.disconnect(other)
        file.main.execute("BEGIN; INSERT INTO t VALUES (2)")
        with pytest.raises(duckdb.Error):
            file.main.execute("INSERT INTO t VALUES ('x')")
    assert len(idle) == 1
    with AttachedFile(tmp_path / "state.duckdb") as file:
        assert file.main.execute("FROM t").fetchall() == []


def test_connection_that_outlives_its_file_never_reaches_the_next(
    tmp_path: Path, idle: list[duckdb.DuckDBPyConnection]
) -> None:
    with AttachedFile(tmp_path / "first.duckdb") as file:
        file.main.execute("CREATE TABLE t (a INTEGER)")
        late = file.connect()
    assert idle == []
    with AttachedFile(tmp_path / "next.duckdb") as other:
        other.main.execute("CREATE TABLE t (a INTEGER)")
        with pytest.raises(duckdb.ConnectionException):
            late.execute("INSERT INTO t VALUES (1)")
        assert other.main.execute("FROM t").fetchall() == []


def test_instance_that_has_spilled_ends_and_deletes_its_files(
    tmp_path: Path, idle: list[duckdb.DuckDBPyConnection]
) -> None:
    with AttachedFile(tmp_path / "state.duckdb") as file:
        file.main.execute("SET memory_limit = '50MB'")
        file.main.execute("CREATE TEMP TABLE t AS SELECT uuid()::VARCHAR AS a FROM range(2_000_000)")
        assert (tmp_path / "state.duckdb.tmp").exists()
    assert idle == []
    assert not (tmp_path / "state.duckdb.tmp").exists()


def test_damaged_file_ends_its_instance(tmp_path: Path, idle: list[duckdb.DuckDBPyConnection]) -> None:
    (tmp_path / "state.duckdb").write_bytes(b"x" * 10_000)
    with pytest.raises(duckdb.Error):
        AttachedFile(tmp_path / "state.duckdb")
    assert idle == []


@pytest.mark.process
def test_forked_process_opens_files_and_ends_in_order(tmp_path: Path, idle: list[duckdb.DuckDBPyConnection]) -> None:
    # In a process of its own: the other threads of this one do not survive a fork.
    script = """
import os, sys
from pathlib import Path
from sr_assets.adapters.state.cached_connection import AttachedFile
for name in ("parent", "child"):
    with AttachedFile(Path(sys.argv[1]) / f"{name}.duckdb") as file:
        print(name, file.main.execute("SELECT 1").fetchall(), flush=True)
    if name == "parent" and (child := os.fork()):
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert (ended.returncode, ended.stdout) == (0, "parent [(1,)]\nchild [(1,)]\n"), ended.stderr
