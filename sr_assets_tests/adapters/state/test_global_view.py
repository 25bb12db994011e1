"""The SQL fold agrees with the rules' own fold, whatever the batch boundaries and the order."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters.range_rows import Advisories
from sr_assets.adapters.state.global_view import GlobalTables
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.advisories import PROTOCOL
from sr_assets.domain.messages import Message
from sr_assets.domain.positions import SECOND_NS
from sr_assets.domain.received import Advisory, Observation, read_message
from sr_assets_tests.domain.advisory_fold import fold
from sr_assets_tests.examples import one_in

BASE = 1_700_000_000
V1 = {"$schema": "https://choria.io/schemas/sr/v1/age_advisory.json"}

documents = st.fixed_dictionaries(
    {
        "replicator": st.sampled_from(("EAST", "WEST")),
        "value": st.sampled_from(("a", "b", "é\0")),
        "event": st.sampled_from(("new", "timeout", "recover", "expire", "unheard")),
        "timestamp": st.integers(BASE, BASE + 4),
        "seen": st.none() | st.integers(BASE - 3, BASE),
    },
    optional={
        "name": st.sampled_from(("", "x")),
        "transition": st.integers(1, 3),
        "event_id": st.sampled_from(("1", "2")),
        "age": st.integers(-1, 3),
    },
)
histories = st.lists(st.tuples(documents, st.booleans(), st.integers(0, 3)), max_size=30)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SiteState]:
    with SiteState(Path(tmp_path_factory.mktemp("state"))) as opened:
        yield opened


def message(sequence: int, document: dict[str, Any], first: bool, stored: int) -> Message:
    body = (V1 if first else {"protocol": PROTOCOL}) | document
    return Message(sequence, (BASE + stored) * 1_000_000_000, "adv.x", b"", json.dumps(body).encode())


@one_in(10)
@given(histories, st.data())
def test_sql_fold_agrees_with_the_rules(
    state: SiteState, history: list[tuple[dict[str, Any], bool, int]], data: st.DataObject
) -> None:
    for table in ("global_nodes", "global_history", "global_sites", "global_rejects"):
        state.connection.execute(f"DELETE FROM {table}")
    messages = [message(sequence, *fields) for sequence, fields in enumerate(history, 1)]
    read = [(read_message(sent.payload, sent.stored_ns), sent.stored_ns) for sent in messages]
    advisories = [(advisory, at) for advisory, at in read if isinstance(advisory, Advisory)]
    tables: GlobalTables = state.global_tables
    remaining = messages
    while remaining:
        cut = data.draw(st.integers(1, len(remaining)))
        with state.transaction():
            tables.fold("FEED", Advisories().converter()(remaining[:cut]))
        remaining = remaining[cut:]
    columns = "replicator, name, stream, node, epoch_ns, transition, event_ns, event_code, seen_ns, origin, received_ns"
    folded = {
        tuple(row[:4]): row[4:] for row in state.connection.execute(f"SELECT {columns} FROM global_nodes").fetchall()
    }
    assert folded == {key: tuple(state) for key, state in fold({}, advisories).items()}
    # The history has each advisory once, as first received in stream order.
    expected: dict[tuple[Any, ...], int] = {}
    for announced, _ in advisories:
        expected.setdefault((announced.event_id, announced.event_ns, *announced[:4]), announced.event_code)
    stored = state.connection.execute("SELECT event_id, event_ns, replicator, name, stream, node FROM global_history")
    assert sorted(stored.fetchall()) == sorted(expected)
    rejects = state.connection.execute("SELECT count(*) FROM global_rejects").fetchall()
    assert rejects == [(len(messages) - len(advisories),)]
    heard = state.connection.execute("SELECT replicator, name, advised_ns FROM global_sites").fetchall()
    assert {(row[0], row[1]): row[2] for row in heard} == {
        site: max(at for advisory, at in advisories if advisory[:2] == site)
        for site in {advisory[:2] for advisory, _ in advisories}
    }


def advisories(*documents: dict[str, Any], epochs: tuple[int, ...]) -> pa.Table:
    """Return the batch that a feed reads for one node's advisories, each with its epoch."""
    common = {"replicator": "EAST", "value": "web1", "name": "x", "stream": "S", "timestamp": BASE}
    messages = [message(n, {**common, **document}, first=False, stored=n) for n, document in enumerate(documents, 1)]
    table = pa.Table.from_batches([Advisories().converter()(messages)])
    return table.set_column(table.schema.get_field_index("epoch_ns"), "epoch_ns", pa.array(epochs, pa.int64()))


def status(state: SiteState) -> list[tuple[Any, ...]]:
    return state.connection.execute("SELECT node, epoch_ns, transition, event_code FROM global_nodes").fetchall()


@pytest.mark.parametrize("cut", (1, 2))
@pytest.mark.parametrize("turned", (False, True), ids=("in order", "older epoch last"))
def test_later_epoch_wins_whatever_its_transition_counter(tmp_path: Path, turned: bool, cut: int) -> None:
    """A forgotten node restarts at transition 1 with a later epoch than the retired node had."""
    expired = {"event": "expire", "transition": 9, "event_id": "old"}
    again = {"event": "new", "transition": 1, "event_id": "fresh"}
    rows = advisories(again, expired, epochs=(7, 3)) if turned else advisories(expired, again, epochs=(3, 7))
    with SiteState(tmp_path) as state:
        for part in (rows.slice(0, cut), rows.slice(cut)):
            state.global_tables.fold("FEED", part)
        assert status(state) == [("web1", 7, 1, 0)]
        kept = state.connection.execute("SELECT event_id, epoch_ns FROM global_history ORDER BY ALL").fetchall()
        assert kept == [("fresh", 7), ("old", 3)]


@pytest.mark.parametrize(
    ("next_within_seconds", "now_seconds", "blind"),
    ((30, 40, []), (30, 41, [("x/S", 10 * SECOND_NS)]), (None, 9_999, [])),
    ids=("just in time", "overdue", "no next heartbeat announced"),
)
def test_site_is_blind_when_its_next_heartbeat_is_overdue(
    tmp_path: Path, next_within_seconds: int | None, now_seconds: int, blind: list[tuple[str, int]]
) -> None:
    within_ns = None if next_within_seconds is None else next_within_seconds * SECOND_NS
    with SiteState(tmp_path) as state:
        heartbeat = Observation("EAST", "x", "S", None, None, None, None, within_ns)
        state.global_tables.observe("FEED", heartbeat, 10 * SECOND_NS)
        assert state.global_tables.blind_sites("FEED", now_seconds * SECOND_NS) == blind
        assert state.global_tables.next_silence("FEED", 0) == (None if within_ns is None else 40 * SECOND_NS)


def test_forget_retired_deletes_only_nodes_retired_before(tmp_path: Path) -> None:
    expired = [{"event": "expire", "value": node, "timestamp": BASE + at} for node, at in (("old", 0), ("young", 9))]
    rows = advisories(*expired, {"event": "timeout", "value": "silent"}, epochs=(1, 1, 1))
    with SiteState(tmp_path) as state:
        state.global_tables.fold("FEED", rows)
        state.global_tables.forget_retired("OTHER", (BASE + 100) * SECOND_NS)
        assert [row[0] for row in sorted(status(state))] == ["old", "silent", "young"]
        state.global_tables.forget_retired("FEED", (BASE + 9) * SECOND_NS)
        assert [row[0] for row in sorted(status(state))] == ["silent", "young"]


def test_forget_feed_keeps_rows_of_other_feeds(tmp_path: Path) -> None:
    with SiteState(tmp_path) as state:
        for feed, node in (("FEED", "a"), ("OTHER", "b")):
            state.global_tables.fold(feed, advisories({"event": "new", "value": node}, epochs=(1,)))
        # A node, its advisory; the site was last reported by the other feed.
        assert state.global_tables.forget_feed("FEED") == 2
        assert [row[0] for row in status(state)] == ["b"]
        assert state.global_tables.reported_sites() == [("EAST", "x", "S")]
