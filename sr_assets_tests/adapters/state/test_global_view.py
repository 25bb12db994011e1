"""The fold as statements gives what the rules' own fold gives, however the history is cut and ordered."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sr_assets.adapters.spark.source import read_advisories
from sr_assets.adapters.state.global_view import GlobalTables
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.advisories import PROTOCOL
from sr_assets.domain.availability import Advisory, read_message
from sr_assets.domain.messages import Message
from sr_assets_tests.domain.advisory_fold import fold

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


def message(place: int, document: dict[str, Any], first: bool, stored: int) -> Message:
    body = (V1 if first else {"protocol": PROTOCOL}) | document
    return Message(place, (BASE + stored) * 1_000_000_000, "adv.x", b"", json.dumps(body).encode())


@settings(max_examples=25, deadline=None)
@given(histories, st.data())
def test_the_statements_fold_like_the_rules(
    state: SiteState, history: list[tuple[dict[str, Any], bool, int]], data: st.DataObject
) -> None:
    for table in ("global_nodes", "global_history", "global_sites", "global_rejects"):
        state.connection.execute(f"DELETE FROM {table}")
    messages = [message(place, *one) for place, one in enumerate(history, 1)]
    read = [(read_message(one.payload, one.stored_ns), one.stored_ns) for one in messages]
    told = [(one, at) for one, at in read if isinstance(one, Advisory)]
    tables: GlobalTables = state.global_tables
    rest = messages
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        with state.transaction():
            tables.fold("FEED", read_advisories(rest[:cut]))
        rest = rest[cut:]
    columns = "replicator, name, stream, node, 0 AS epoch_ns, transition, event_ns, cycle, seen_ns, origin, received_ns"
    found = {
        tuple(row[:4]): row[4:] for row in state.connection.execute(f"SELECT {columns} FROM global_nodes").fetchall()
    }
    assert found == {key: tuple(standing) for key, standing in fold({}, told).items()}
    # The history has each advisory once, at the time it was received first in the stream's order of storing.
    expected: dict[tuple[Any, ...], int] = {}
    for one, _ in told:
        expected.setdefault((one.event_id, one.event_ns, *one[:4]), one.event_code)
    kept = state.connection.execute("SELECT event_id, event_ns, replicator, name, stream, node FROM global_history")
    assert sorted(kept.fetchall()) == sorted(expected)
    rejects = state.connection.execute("SELECT count(*) FROM global_rejects").fetchall()
    assert rejects == [(len(messages) - len(told),)]
    heard = state.connection.execute("SELECT replicator, name, advised_ns FROM global_sites").fetchall()
    assert {(row[0], row[1]): row[2] for row in heard} == {
        site: max(at for one, at in told if one[:2] == site) for site in {one[:2] for one, _ in told}
    }
