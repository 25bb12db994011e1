"""A site's private state: atomic batches, and clear errors for a foreign file."""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pyarrow as pa
import pytest

from sr_assets.adapters import control
from sr_assets.adapters.state.database import keep_newest_asides
from sr_assets.adapters.state.lock import SiteBusyError, SiteLock, lock_owner
from sr_assets.adapters.state.records import Intent, StreamState
from sr_assets.adapters.state.status_file import SiteStatus, StreamStatus, outdate_status, read_status, write_status
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.errors import RunError
from sr_assets.domain.tracking.rules import NODE_COLUMNS

INTENT = Intent("S", 1, 1, 11, 5, None, 7, 8, 9)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[SiteState]:
    with SiteState(tmp_path) as opened:
        yield opened


def node(name: str, *, deadline_ns: int | None, status: str = "up") -> dict[str, object]:
    values = dict.fromkeys(NODE_COLUMNS, 1) | {"status": status, "retired_at_ns": 1 if status == "retired" else None}
    return {"node": name, **values, "deadline_ns": deadline_ns}


def nodes(*rows: dict[str, object]) -> pa.Table:
    fields = [(name, pa.string() if name in ("node", "status") else pa.int64()) for name in rows[0]]
    return pa.Table.from_pylist(list(rows), schema=pa.schema(fields))


def test_state_keeps_committed_rows_when_reopened(tmp_path: Path) -> None:
    with SiteState(tmp_path) as state, state.transaction():
        assert state.load_stream("S") is None
        state.save_stream(StreamState("S", 7, 11, watermark_ns=3, seen_messages=10))
        state.save_stream(StreamState("S", 7, 21, watermark_ns=4, seen_messages=20))
    with SiteState(tmp_path) as state:
        stream = state.load_stream("S")
        assert stream == StreamState("S", 7, 21, watermark_ns=4, seen_messages=20)
        assert state.load_stream("T") is None


@pytest.mark.parametrize("seed", range(3))
def test_saved_record_is_what_the_file_holds(state: SiteState, seed: int) -> None:
    """Only changed columns are written: what has changed must be right after any transaction, committed or not."""
    chosen = random.Random(seed)
    committed: dict[str, StreamState] = {}
    with state.second_connection() as other:
        for number in range(1, 60):
            written = dict(committed)
            writer, fails = chosen.choice((state, other)), chosen.random() < 0.3
            with contextlib.suppress(KeyboardInterrupt), writer.transaction():
                for stream in chosen.choices("ST", k=chosen.randrange(1, 4)):
                    if chosen.random() < 0.2:
                        writer.forget_stream(stream)
                        written.pop(stream, None)
                        continue
                    before = written.get(stream, StreamState(stream, 7, 1))
                    change = chosen.choice(
                        (
                            {},
                            {"watermark_ns": number},
                            {"watermark_ns": None},
                            {"hole_open": number % 2 == 0, "last_error": "down"},
                        )
                    )
                    written[stream] = replace(before, **change)
                    writer.save_stream(written[stream])
                if fails:
                    raise KeyboardInterrupt
            committed = committed if fails else written
            columns = ", ".join(each.name for each in fields(StreamState))
            rows = state.connection.raw.execute(f"SELECT {columns} FROM streams ORDER BY stream").fetchall()
            assert [StreamState(*row) for row in rows] == [committed[stream] for stream in sorted(committed)], number
            if chosen.random() < 0.5:
                assert chosen.choice((state, other)).load_stream("S") == committed.get("S"), number


def test_erase_stream_leaves_no_row_in_any_table(state: SiteState) -> None:
    tables = state.connection.execute(
        "SELECT table_name FROM information_schema.columns WHERE column_name = 'stream' AND table_name NOT LIKE 'global_%'"
    ).fetchall()
    assert ("heartbeats",) in tables
    with state.transaction():
        for (table,) in tables:
            state.connection.execute(f"INSERT INTO {table} (stream) VALUES ('S'), ('T')")
        state.erase_stream("S")
    for (table,) in tables:
        assert state.connection.execute(f"SELECT stream FROM {table}").fetchall() == [("T",)], table
    assert state.known_streams() == ["T"]


def test_state_disables_the_progress_bar(state: SiteState) -> None:
    with state.second_connection() as other:
        for each in (state, other):
            assert each.connection.execute("SELECT current_setting('enable_progress_bar')").fetchall() == [(False,)]


def test_failed_transaction_changes_nothing(state: SiteState) -> None:
    def fail() -> None:
        with state.transaction():
            state.save_stream(StreamState("S", 7, 11))
            state.nodes("S").merge(nodes(node("a", deadline_ns=5)))
            state.clear_intent("S")
            raise KeyboardInterrupt

    state.save_intent(INTENT)
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert state.load_stream("S") is None
    assert state.nodes("S").next_deadline() is None
    assert state.open_intent("S") == INTENT


def test_intent_replaces_the_previous_one_of_its_kind(tmp_path: Path) -> None:
    batch = Intent("S", 1, 2, 11, 5, 6, 7, 8, 9, waits=True)
    resend = Intent("S", 1, 1, 3, 5, None, 7, 8, 9, resend=True)
    with SiteState(tmp_path) as state:
        for intent in (INTENT, batch, resend):
            state.save_intent(intent)
    with SiteState(tmp_path) as state:
        assert state.open_intent("S") == batch
        assert state.open_intent("S", resend=True) == resend
        assert state.open_intent("T") is None
        state.clear_intent("S", resend=True)
        assert state.open_intent("S") == batch
        assert state.open_intent("S", resend=True) is None


def test_fold_input_has_sightings_with_a_sender_and_their_nodes(state: SiteState) -> None:
    state.nodes("S").merge(nodes(node("a", deadline_ns=5), node("b", deadline_ns=5)))
    state.nodes("T").merge(nodes(node("a", deadline_ns=5)))
    # An earlier query that was not read to its end does not block the next one.
    assert state.open_intent("S") is None
    state.save_intent(INTENT)
    assert state.open_intent("S") == INTENT
    sightings = pa.table(
        {
            "sequence": [4, 5, 6],
            "stored_ns": [1, 2, 3],
            "sender": ["a", None, "new"],
            "payload_bytes": [0, 0, 0],
            "forced": [False, False, True],
        }
    )
    rows = sorted(state.nodes("S").fold_input(sightings).to_pylist(), key=lambda row: (row["sender"], row["sighting"]))
    assert [(row["sender"], row["sighting"], row["status"], row["forced"]) for row in rows] == [
        ("a", 0, "up", False),
        ("a", 4, None, False),
        ("new", 6, None, True),
    ]


def test_due_returns_nodes_before_the_watermark_by_deadline(state: SiteState) -> None:
    state.nodes("S").merge(
        nodes(
            node("late", deadline_ns=9), node("b", deadline_ns=5), node("a", deadline_ns=5), node("r", deadline_ns=None)
        ),
    )
    assert state.nodes("S").due(9, 3)["node"].to_pylist() == ["a", "b"]
    assert state.nodes("S").due(9, 1)["node"].to_pylist() == ["a"]
    assert not state.nodes("S").due(5, 3).num_rows
    assert state.nodes("S").next_deadline() == 5
    state.nodes("S").merge(nodes(node("a", deadline_ns=7), node("b", deadline_ns=8)))
    assert state.nodes("S").next_deadline() == 7
    assert state.nodes("S").due(100, 9).num_rows == 3


def test_forget_retired_deletes_only_nodes_retired_before(state: SiteState) -> None:
    state.nodes("S").merge(nodes(node("up", deadline_ns=5), node("gone", deadline_ns=None, status="retired")))
    state.nodes("S").forget_retired(1)
    assert len(state.connection.execute("SELECT * FROM nodes").fetchall()) == 2
    state.nodes("S").forget_retired(2)
    assert state.connection.execute("SELECT node FROM nodes").fetchall() == [("up",)]


def test_outbox_orders_by_time_then_node_then_transition(state: SiteState) -> None:
    rows = [("e3", "b", 9, 1), ("e2", "a", 5, 2), ("e1", "a", 5, 1), ("e4", "c", 1, 1)]
    for event_id, name, event_ns, transition in rows:
        state.connection.execute(
            "INSERT INTO transitions (event_id, stream, node, event_ns, transition, outbox) VALUES (?, 'S', ?, ?, ?, ?)",
            [event_id, name, event_ns, transition, event_id != "e4"],
        )
    assert [row["event_id"] for row in state.outbox("S").unpublished(10)] == ["e1", "e2", "e3"]
    assert [row["event_id"] for row in state.outbox("S").unpublished(1)] == ["e1"]
    state.outbox("S").mark_published(["e1", "e3"], 77)
    assert [row["event_id"] for row in state.outbox("S").unpublished(10)] == ["e2"]
    assert state.outbox("S").size() == 1


def test_damaged_state_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "state.duckdb").write_bytes(b"x" * 10_000)
    with pytest.raises(RunError, match="sr-assets recover") as raised, SiteState(tmp_path):
        pass
    assert str(tmp_path / "state.duckdb") in str(raised.value)
    assert "\n" not in str(raised.value)


def test_forget_history_keeps_unpublished_and_last_transitions(tmp_path: Path) -> None:
    rows = [
        {
            "stream": stream,
            "event_id": f"{node}{number}",
            "node": node,
            "transition": number,
            "event_ns": number,
            **more,
        }
        for stream, node, number, more in (
            ("S", "known", 1, {"outbox": True, "published_ns": 9}),
            ("S", "known", 2, {"outbox": False, "published_ns": None}),
            ("S", "forgotten", 1, {"outbox": False, "published_ns": None}),
            ("S", "waits", 1, {"outbox": True, "published_ns": None}),
            ("S", "forgotten", 5, {"outbox": False, "published_ns": None}),
            ("T", "other", 1, {"outbox": False, "published_ns": None}),
        )
    ]
    with SiteState(tmp_path) as state, state.transaction():
        state.add_rows("transitions", pa.Table.from_pylist(rows))
        state.connection.execute("INSERT INTO nodes (stream, node, transition) VALUES ('S', 'known', 2)")
        for table, column in (("gaps", "noticed_ns"), ("parked", "parked_ns")):
            for at_ns in (6, 7):
                state.connection.execute(f"INSERT INTO {table} (stream, {column}) VALUES ('S', ?)", [at_ns])
        state.forget_history("S", gaps_ns=7, transitions_ns=5)
        stored = state.connection.execute("SELECT event_id FROM transitions ORDER BY 1").fetchall()
        assert [row[0] for row in stored] == ["forgotten5", "known2", "other1", "waits1"]
        assert state.connection.execute("SELECT noticed_ns, parked_ns FROM gaps, parked").fetchall() == [(7, 7)]


@pytest.mark.parametrize(
    ("version", "statement"),
    ((7, "DROP TABLE nodes"), (1, "DROP TABLE copying")),
    ids=("schema 7", "unreleased schema 1"),
)
def test_state_of_other_schema_is_refused_and_kept(tmp_path: Path, version: int, statement: str) -> None:
    file = tmp_path / "state.duckdb"
    with SiteState(tmp_path) as state:
        state.connection.execute(f"UPDATE about SET schema_version = {version}")
        state.connection.execute(statement)
    before = file.read_bytes()
    with (
        pytest.raises(
            RunError, match=rf"^{file}: schema {version} is of an unreleased version; move the home away.*recover"
        ),
        SiteState(tmp_path),
    ):
        pass
    assert file.read_bytes() == before


def test_site_lock_has_one_owner_until_it_ends(tmp_path: Path) -> None:
    assert lock_owner(tmp_path) is None
    with SiteLock(tmp_path, "first", 0):
        assert (lock_owner(tmp_path) or "").startswith("first (pid ")
        with pytest.raises(SiteBusyError, match="first"), SiteLock(tmp_path, "second", 0.2):
            pass
        assert (lock_owner(tmp_path) or "").startswith("first")
    assert lock_owner(tmp_path) is None
    with SiteLock(tmp_path, "third", 0):
        assert (lock_owner(tmp_path) or "").startswith("third")


@pytest.mark.parametrize("text", ("", "{", "[]", "null"))
def test_unreadable_status_is_empty(tmp_path: Path, text: str) -> None:
    unknown = SiteStatus(exists=False)
    assert read_status(tmp_path) == unknown
    control.change(tmp_path, "INSERT INTO site_status (site, status) VALUES ('', ?)", text)
    assert read_status(tmp_path) == unknown
    write_status(
        tmp_path, SiteStatus({"S": StreamStatus(next_sequence=3, counters={"errors": {"": 1.0}})}, "digest", 5)
    )
    status = read_status(tmp_path)
    assert read_status(tmp_path) is status
    assert status.of("S").next_sequence == 3
    assert (status.configuration, status.committed_at_ns, status.of("S").counters) == (
        "digest",
        5,
        {"errors": {"": 1.0}},
    )
    assert status.of("other") == StreamStatus()
    assert (status.is_outdated, status.age_seconds is not None) == (False, True)
    outdate_status(tmp_path)
    assert read_status(tmp_path).is_outdated


def test_newest_two_states_of_each_kind_stay_set_aside(tmp_path: Path) -> None:
    kept = {"state.duckdb", "state.duckdb.wal", "other"}
    names = [f"state.duckdb.{kind}-{number}" for kind in ("replaced", "broken") for number in range(1, 5)]
    for name in (*kept, *names, *(f"{name}.wal" for name in names[::2])):
        (tmp_path / name).touch()
    for kind in ("replaced", "broken"):
        keep_newest_asides(tmp_path / "state.duckdb", kind)
        kept |= {f"state.duckdb.{kind}-3", f"state.duckdb.{kind}-3.wal", f"state.duckdb.{kind}-4"}
    assert {file.name for file in tmp_path.iterdir()} == kept
