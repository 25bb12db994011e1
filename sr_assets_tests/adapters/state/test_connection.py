"""The connection to the state remembers rows, and always returns the same as the file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters.state.cached_connection import StateConnection
from sr_assets.adapters.state.database import open_database
from sr_assets_tests.examples import one_in

_QUERIES = (
    "SELECT count(*) FROM staged WHERE stream = ?",
    "SELECT first FROM staged WHERE stream = ? ORDER BY first",
    "SELECT staged.first FROM staged JOIN gaps USING (stream) WHERE stream = ? ORDER BY ALL",
)


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[StateConnection]:
    """A connection to an empty state."""
    connection = StateConnection(open_database(tmp_path / "state.duckdb"))
    yield connection
    connection.close()


def count(connection: StateConnection) -> int:
    """Return the number of staged batches of the stream S."""
    return int(connection.rows(_QUERIES[0], ["S"])[0][0])


def stage(connection: StateConnection) -> None:
    """Add a staged batch of the stream S."""
    connection.execute("INSERT INTO staged (stream, first, next) VALUES ('S', 1, 2)")


def test_rows_are_not_read_again_without_a_commit(connection: StateConnection) -> None:
    assert count(connection) == 0
    connection.raw.execute("INSERT INTO staged (stream, first, next) VALUES ('S', 1, 2)")  # unseen
    connection.execute("INSERT INTO gaps (stream) VALUES ('S')")
    assert count(connection) == 0
    stage(connection)
    assert count(connection) == 2


def test_commit_of_another_connection_is_seen(connection: StateConnection) -> None:
    other = connection.second()
    assert count(connection) == 0
    other.begin()
    stage(other)
    assert (count(other), count(connection)) == (1, 0)
    other.commit()
    assert count(connection) == 1


def test_rolled_back_rows_are_not_remembered(connection: StateConnection) -> None:
    connection.begin()
    stage(connection)
    assert count(connection) == 1
    connection.rollback()
    assert count(connection) == 0


def test_snapshot_keeps_its_rows_while_another_connection_commits(connection: StateConnection) -> None:
    reading = connection.second()
    assert count(reading) == 0
    reading.begin_snapshot()
    stage(connection)
    assert (count(connection), count(reading)) == (1, 0)
    reading.rollback()
    assert count(reading) == 1


STEPS = ("write", "expect", "end", "undo", "read")


@one_in(4)
@given(steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 1)), max_size=25))
def test_remembered_rows_equal_those_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    first = StateConnection(open_database(tmp_path_factory.mktemp("state") / "state.duckdb"))
    pair, streams, open_ones = (first, first.second()), ("S", "T"), {0: False, 1: False}
    for number, (step, which) in enumerate(steps):
        connection, stream = pair[which], streams[which]
        if step == "write" and not open_ones[which]:
            connection.begin()
            open_ones[which] = True
        elif step == "write":
            connection.execute("INSERT INTO staged (stream, first, next) VALUES (?, ?, 0)", [stream, number])
            connection.execute("INSERT INTO gaps (stream) VALUES (?)", [stream])
        elif step == "expect" and open_ones[which]:
            for query in _QUERIES:
                connection.expect(query, [stream], connection.raw.execute(query, [stream]).fetchall())
        elif step in {"end", "undo"} and open_ones[which]:
            (connection.commit if step == "end" else connection.rollback)()
            open_ones[which] = False
        elif step == "read":
            for query in _QUERIES:
                for each in streams:
                    assert connection.rows(query, [each]) == connection.raw.execute(query, [each]).fetchall()
    for connection in pair:
        connection.close()


def test_expected_rows_are_remembered_unless_changed_again(connection: StateConnection) -> None:
    for later, known in (("gaps", 7), ("staged", 1)):
        connection.begin()
        connection.execute("DELETE FROM staged")
        connection.expect(_QUERIES[0], ["S"], [(7,)])
        connection.execute(f"INSERT INTO {later} (stream) VALUES ('S')")
        connection.commit()
        assert count(connection) == known


def test_remembered_value_lasts_until_its_table_changes(connection: StateConnection) -> None:
    def in_snapshot(value: object = None) -> object:
        connection.begin_snapshot()
        if value is not None:
            connection.remember(("file",), _QUERIES[0], value)
        remembered = connection.remembered(("file",), _QUERIES[0])
        connection.rollback()
        return remembered

    assert in_snapshot("first") == "first"
    connection.execute("INSERT INTO gaps (stream) VALUES ('S')")
    assert in_snapshot() == "first"
    stage(connection)
    assert in_snapshot() is None
    assert in_snapshot("second") == "second"


def test_value_of_an_older_snapshot_is_not_remembered(connection: StateConnection) -> None:
    other = connection.second()
    connection.begin_snapshot()
    stage(other)
    connection.remember(("file",), _QUERIES[0], "old")
    connection.rollback()
    connection.begin_snapshot()
    assert connection.remembered(("file",), _QUERIES[0]) is None
    connection.rollback()
