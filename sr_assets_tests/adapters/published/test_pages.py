"""Nodes in pages: the same rows in the same order, whatever the size of a page."""

from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.published import queries
from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.published.stream_status import PublishedStream
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets_tests.published import MINUTE_NS, NOW_NS, node_row, publish_nodes

ALL: dict[str, Any] = {"status": None, "silent_for": None, "like": None}
#: A fleet in a feed: sites of different sizes, and a Stream Replicator without a name and a stream.
FLEET = """
INSERT INTO global_nodes BY NAME SELECT 'FEED' AS feed, 'EAST' AS replicator, if(i % 3 = 0, '', 'site' || i % 5) AS name,
    if(i % 3 = 0, '', 'S') AS stream, 'node''' || i AS node, 1 AS epoch_ns, 1 AS transition, $now AS event_ns, 0 AS event_code,
    'ours' AS origin, $now AS received_ns FROM range(80) AS t (i)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with the nodes of a stream and of a feed."""
    statuses = ("up", "timeout", "retired")
    publish_nodes(tmp_path, *(node_row(f"web{n}'s", statuses[n % 3], n * MINUTE_NS) for n in range(60)))
    with SiteState(tmp_path / "sites" / "centre") as state:
        with state.transaction():
            state.save_stream(StreamState("FEED", 1, 1, watermark_ns=NOW_NS, as_of_ns=NOW_NS))
            state.connection.execute(FLEET, {"now": NOW_NS})
        feed = [PublishedStream("FEED", "", tracked=False)]
        publish_site(tmp_path, "centre", state, feed, sites=["london", "centre"], run=Run(NOW_NS, "test"))
    return tmp_path


def local_rows(home: Path, **narrowed: Any) -> list[tuple[Any, ...]]:
    with queries.nodes(home, labels=None, **ALL | narrowed) as (_, rows):
        return list(rows)


def global_rows(home: Path, limit: int | None = None) -> list[tuple[Any, ...]]:
    with queries.global_nodes(home, site=None, stream=None, **ALL, limit=limit) as (columns, rows):
        assert columns[:4] == ("replicator", "name", "stream", "node")
        return list(rows)


@pytest.mark.parametrize("page_rows", (7, 59))
def test_pages_change_no_row_and_no_order(home: Path, monkeypatch: pytest.MonkeyPatch, page_rows: int) -> None:
    whole = local_rows(home), local_rows(home, status="up"), global_rows(home)
    assert [len(rows) for rows in whole] == [60, 20, 80]
    monkeypatch.setattr(queries, "PAGE_ROWS", page_rows)
    assert (local_rows(home), local_rows(home, status="up"), global_rows(home)) == whole


def test_limited_rows_are_the_first_ones(home: Path) -> None:
    assert global_rows(home, limit=11) == global_rows(home)[:11]


def test_reader_may_stop_early(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "PAGE_ROWS", 7)
    with queries.nodes(home, labels=None, **ALL) as (_, rows):
        assert next(rows)[2] == "web0's"
