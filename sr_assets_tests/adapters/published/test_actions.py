"""The table `operator_actions`: complete lines from concurrent commands, and actions that outlive a failing disk."""

import getpass
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pytest

from sr_assets.adapters.published.actions import Origin, actions_query, record_action


def rows(home: Path) -> list[tuple[object, ...]]:
    with duckdb.connect() as connection:
        query = f'SELECT * EXCLUDE ("at", occurred_at, operator) FROM ({actions_query(home)}) ORDER BY subject'
        return connection.execute(query).fetchall()


def test_table_without_actions_is_empty(tmp_path: Path) -> None:
    assert rows(tmp_path) == []


def test_concurrent_actions_are_all_recorded(tmp_path: Path) -> None:
    detail = 'two\nlines, "quotes" and ü' + "x" * 3_000
    with ThreadPoolExecutor(8) as pool:
        for number in range(200):
            pool.submit(record_action, tmp_path, "pause", f"london/{number:03}", detail)
    user, host = getpass.getuser(), socket.gethostname()
    assert rows(tmp_path) == [(user, host, "pause", f"london/{number:03}", detail) for number in range(200)]


def test_action_of_another_process_is_recorded_once(tmp_path: Path) -> None:
    by = Origin("2026-01-01T00:00:00.000000+00:00", "ann", "desk")
    for _ in range(2):
        record_action(tmp_path, "retire", "web1", "sold", by=by, again=True)
    assert rows(tmp_path) == [("ann", "desk", "retire", "web1", "sold")]


def test_user_without_a_name_is_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", nameless)
    record_action(tmp_path, "resume", "london/REG")
    assert rows(tmp_path)[0][0] == str(os.getuid())


def test_action_that_cannot_be_recorded_is_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "actions").write_text("a file in the place of the folder")
    record_action(tmp_path, "pause", "london/REG")
    assert [record.levelname for record in caplog.records if "not recorded" in record.message] == ["WARNING"]


def test_half_a_line_hides_no_other_action(tmp_path: Path) -> None:
    record_action(tmp_path, "pause", "S")
    with (tmp_path / "actions" / "actions.jsonl").open("a") as file:
        file.write('{"at": "2026-01-01T00:')
    with duckdb.connect() as connection:
        assert connection.execute(f"SELECT action FROM ({actions_query(tmp_path)})").fetchall() == [("pause",)]
