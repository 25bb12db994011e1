"""The control store: other processes, deleted, damaged and foreign files, and the files of earlier versions."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from sr_assets.adapters import control
from sr_assets.adapters.run_failures import RunFailure, read_run_failures
from sr_assets.adapters.state.checkpoint import Stored, last_seen, last_stored
from sr_assets.adapters.state.heartbeat_counts import HeartbeatCounts
from sr_assets.adapters.state.operator_settings import added_windows, paused_streams
from sr_assets.adapters.state.orders import is_pending
from sr_assets.adapters.state.status_file import read_status
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.tracking.maintenance import Window

ADD = "INSERT INTO paused VALUES (?, ?)"


def paused(home: Path) -> list[tuple[str, ...]]:
    return control.query(home, "SELECT stream FROM paused ORDER BY stream")


def test_query_creates_nothing(tmp_path: Path) -> None:
    assert paused(tmp_path / "home") == []
    assert not (tmp_path / "home").exists()


def test_files_are_private(tmp_path: Path) -> None:
    os.umask(0)
    control.change(tmp_path, ADD, "LONDON", "S")
    files = list(tmp_path.glob("control.db*"))
    assert len(files) == 3
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_failed_block_changes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="UNIQUE"), control.transaction(tmp_path) as connection:
        connection.executemany(ADD, [["LONDON", "S"], ["LONDON", "S"]])
    assert paused(tmp_path) == []


@pytest.mark.parametrize(("durable", "synchronous"), ((True, 2), (False, 1)))
def test_only_durable_changes_wait_for_the_disk(tmp_path: Path, durable: bool, synchronous: int) -> None:
    with control.transaction(tmp_path, durable=durable) as connection:
        assert connection.execute("PRAGMA synchronous").fetchall() == [(synchronous,)]


def test_deleted_store_begins_anew(tmp_path: Path) -> None:
    control.change(tmp_path, ADD, "LONDON", "S")
    for file in tmp_path.glob("control.db*"):
        file.unlink()
    assert paused(tmp_path) == []
    control.change(tmp_path, ADD, "LONDON", "T")
    assert paused(tmp_path) == [("T",)]


def test_damaged_store_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "control.db").write_text("not a database" * 100)
    for attempt in (lambda: paused(tmp_path), lambda: control.change(tmp_path, ADD, "LONDON", "S")):
        with pytest.raises(RunError, match=r"control\.db cannot be read \(.*\); stop the platform, move the file away"):
            attempt()


def test_store_of_a_later_version_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "control.db")) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(RunError, match="version 99 is of a later sr-assets"):
        paused(tmp_path)


def test_planted_link_is_refused(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "control.db").symlink_to(precious)
    with pytest.raises(ConfigurationError, match=r"control\.db is a symbolic link"):
        control.change(tmp_path, ADD, "LONDON", "S")
    assert precious.read_text() == "mine"


def elsewhere(home: Path, *lines: str) -> subprocess.CompletedProcess[str]:
    """Run lines with `control` and `home` in another process."""
    script = f"from pathlib import Path; from sr_assets.adapters import control; home = Path({str(home)!r})"
    command = [sys.executable, "-c", "\n".join((script, *lines))]
    return subprocess.run(command, capture_output=True, text=True, check=False)


CHANGE = f"control.change(home, {ADD!r}, 'LONDON', 'S')"


@pytest.mark.process
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_reads_the_store_of_a_user_but_changes_nothing(tmp_path: Path) -> None:
    user = 65_534
    (tmp_path / "sites").mkdir()
    for path in (tmp_path, tmp_path / "sites"):
        os.chown(path, user, user)
    # Only a process of the owner creates it.
    assert paused(tmp_path) == []
    assert not (tmp_path / "control.db").exists()
    assert elsewhere(tmp_path, CHANGE).returncode == 0
    for file in tmp_path.glob("control.db*"):
        os.chown(file, user, user)
    ended = elsewhere(tmp_path, "print(control.query(home, 'SELECT stream FROM paused'))", CHANGE)
    assert ended.stdout == "[('S',)]\n"
    assert "control.db belongs to user" in ended.stderr
    assert {file.stat().st_uid for file in tmp_path.glob("control.db*")} == {user}


@pytest.mark.process
def test_other_users_read_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert elsewhere(tmp_path, CHANGE).returncode == 0
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert paused(tmp_path) == []


#: A parent with an open connection forks. The child holds a lock of the database, so that it must hold it in the kernel too:
#: the parent and a new process see that it is taken.
_FORKING = """
import os, sqlite3, subprocess, sys
from pathlib import Path
from sr_assets.adapters import control

home = Path(sys.argv[1])
control.change(home, "INSERT INTO paused VALUES ('LONDON', 'parent')")
child = os.fork()
if child == 0:
    with control.transaction(home) as connection:
        connection.execute("INSERT INTO paused VALUES ('LONDON', 'child')")
        locks = [line.split() for line in open("/proc/locks") if line.split()[4] == str(os.getpid())]
        inodes = {line[5].rpartition(":")[2] for line in locks}
        assert {str((home / name).stat().st_ino) for name in ("control.db", "control.db-shm")} <= inodes, locks
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
control.change(home, "INSERT INTO paused VALUES ('LONDON', 'parent again')")
"""


@pytest.mark.process
def test_forked_process_holds_locks_of_its_own(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _FORKING, str(tmp_path)], check=True)
    assert paused(tmp_path) == [("child",), ("parent",), ("parent again",)]


def test_connection_of_a_deleted_store_deletes_no_file_of_the_next(tmp_path: Path) -> None:
    control.change(tmp_path / "first", ADD, "LONDON", "S")
    for file in (tmp_path / "first").iterdir():
        file.unlink()
    control.change(tmp_path / "first", ADD, "LONDON", "T")
    # The connections that were opened first are closed first.
    for name in range(10):
        control.change(tmp_path / str(name), ADD, "LONDON", "U")
        assert paused(tmp_path / "first") == [("T",)]
        files = {file.name for file in (tmp_path / "first").iterdir()}
        assert files == {"control.db", "control.db-shm", "control.db-wal"}


def write_earlier(home: Path) -> Path:
    """Write the files of an earlier version; return the site's folder."""
    folder = home / "sites" / "LONDON"
    files = {
        folder / "status.json": {
            "site": "LONDON",
            "configuration": "c",
            "streams": {"S": {"next_sequence": 7}, "S-1": {}},
        },
        folder / "paused.json": {"streams": ["S"]},
        folder / "maintenance.json": {
            "windows": [
                {"id": "b", "globs": ["*"], "from_ns": 1, "to_ns": 2},
                {"id": "a", "globs": ["*"], "from_ns": 1, "to_ns": 2},
            ]
        },
        folder / "checkpoint.json": {"at_ns": 1, "positions": {"S": 7}},
        folder / "checkpoint.seen": 12,
        folder / "heartbeats.json": {"s": {"published": 3, "errors": 1, "seconds": 0.5}},
        folder / "refill" / "S_1.json": {"below": 4, "again": True},
        home / "run_failures.json": [
            {"job": "j", "run_id": "r", "name": "LONDON", "streams": ["S"], "reason": "lost", "since_ns": 5}
        ],
        home / "due_work.json": {"checked_at": 1.5},
        home / "notify" / "0123.json": {"since": {}},
    }
    for file, content in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    for name in ("checkpoint-now", "closed", "step-down", "lock"):
        (folder / name).touch()
    (home / "waiting").mkdir()
    (home / "waiting" / "LONDON").write_text("1 2")
    (folder / "requests").mkdir()
    (folder / "requests" / "1.json").touch()
    return folder


def test_files_of_an_earlier_version_are_read_and_removed(tmp_path: Path) -> None:
    folder = write_earlier(tmp_path)
    assert paused_streams(folder) == {"S"}
    assert added_windows(folder) == [Window("b", ("*",), 1, 2), Window("a", ("*",), 1, 2)]
    status = read_status(folder)
    assert (status.configuration, status.of("S").next_sequence) == ("c", 7)
    assert (last_stored(folder), last_seen(folder)) == (Stored(1, {"S": 7}), 12)
    assert is_pending(folder, "checkpoint")
    assert not is_pending(folder, "step down")
    assert HeartbeatCounts.read(folder) == {"s": HeartbeatCounts(3, 1, 0.5)}
    assert read_run_failures(tmp_path) == {"j": RunFailure("j", "r", "LONDON", ("S",), "lost", 5)}
    rows = {table: control.query(tmp_path, f"SELECT * FROM {table}") for table in ("refills", "due_work", "notified")}
    assert rows == {
        "refills": [("LONDON", "S-1", '{"below": 4}', 1)],
        "due_work": [("checked_at", "1.5")],
        "notified": [("0123", '{"since": {}}')],
    }
    control.end_upgrade(folder)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"control.db", "control.db-shm", "control.db-wal", "sites/LONDON/lock"}


def test_files_of_an_earlier_version_are_read_before_they_are_removed(tmp_path: Path) -> None:
    folder = write_earlier(tmp_path)
    control.end_upgrade(folder)
    assert not (folder / "paused.json").exists()
    assert paused_streams(folder) == {"S"}


def test_file_of_an_earlier_version_is_read_once(tmp_path: Path) -> None:
    folder = write_earlier(tmp_path)
    assert control.change(tmp_path, "DELETE FROM paused") == 1
    control.end_upgrade(folder)
    assert paused_streams(folder) == frozenset()


@pytest.mark.parametrize("text", ("", "[]", '{"streams": 1}', "{"))
@pytest.mark.parametrize("name", ("paused.json", "maintenance.json"))
def test_damaged_file_of_an_operator_is_an_error(tmp_path: Path, name: str, text: str) -> None:
    folder = write_earlier(tmp_path)
    (folder / name).write_text(text)
    for _ in range(2):
        with pytest.raises(RunError, match=rf"{name} cannot be read"):
            paused_streams(folder)
    (folder / name).unlink()
    assert len(paused_streams(folder)) + len(added_windows(folder)) > 0


@pytest.mark.parametrize("text", ("", "[]", "{", '{"x": 1}', '[{"job": [1]}]'))
@pytest.mark.parametrize(
    "name",
    ("status.json", "checkpoint.json", "checkpoint.seen", "heartbeats.json", "refill/S_1.json", "../../due_work.json"),
)
def test_other_damaged_file_is_left_out(tmp_path: Path, name: str, text: str) -> None:
    folder = write_earlier(tmp_path)
    (folder / name).write_text(text)
    assert paused_streams(folder) == {"S"}
