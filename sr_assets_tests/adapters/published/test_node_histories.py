"""The input of the daily tables: nodes whose retirement was undone."""

from pathlib import Path

import pytest

from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.published.node_histories import RETIRED, TIMEOUT, UP, Histories, read_streams
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.published.stream_status import PublishedStream
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.days import day_of
from sr_assets.domain.received import Observation
from sr_assets_tests.histories import BEGIN_NS, FIRST, HOUR, SITE, STREAM, Change, publish, publish_centre

NEW, EXPIRE = Change(BEGIN_NS, "new", None), Change(BEGIN_NS + HOUR, "expire", "up")
UNDONE_NS = BEGIN_NS + 2 * HOUR


@pytest.mark.parametrize(
    ("later", "after"),
    (
        ([], [UP, RETIRED, UP]),
        ([Change(BEGIN_NS + 3 * HOUR, "timeout", "up")], [UP, RETIRED, UP, TIMEOUT]),
        ([Change(BEGIN_NS + 3 * HOUR, "recover", "timeout")], [UP, RETIRED, TIMEOUT, UP]),
    ),
)
def test_undone_retirement_ends_with_the_status_after_it(tmp_path: Path, later: list[Change], after: list[int]) -> None:
    publish(tmp_path, {"a": [NEW, EXPIRE, *later], "b": [NEW, EXPIRE]}, BEGIN_NS + 4 * HOUR)
    with SiteState(tmp_path / "sites" / SITE) as state:
        with state.transaction():
            state.outbox(STREAM).undo("a", 2, UNDONE_NS)
            if not later:
                state.connection.execute("UPDATE nodes SET status = 'up', retired_at_ns = NULL WHERE node = 'a'")
        streams = [PublishedStream(STREAM, "COPY", tracked=True)]
        publish_site(tmp_path, SITE, state, streams, sites=[SITE], run=Run(BEGIN_NS + 4 * HOUR, "again"))
    with open_fleet(tmp_path) as connection:
        histories = Histories(connection, read_streams(connection, "EU", own=False))
        (nodes,) = histories.portions([day_of(FIRST)], 1_000)
    first, second = nodes.to_pylist()
    assert first["after"] == after
    assert first["at_ns"] == [BEGIN_NS, BEGIN_NS + HOUR, UNDONE_NS, *(change.at_ns for change in later)]
    assert second["after"] == [UP, RETIRED]


def test_watermark_that_a_site_reports_never_sets_the_clock(tmp_path: Path) -> None:
    """A heartbeat of an invented stream is a century ahead, as a home of yesterday may have stored it."""
    ahead_ns, now_ns = BEGIN_NS + 36_500 * 24 * HOUR, BEGIN_NS + 4 * HOUR
    publish_centre(tmp_path, {"a": [NEW]}, now_ns)
    with SiteState(tmp_path / "sites" / "centre") as state:
        with state.transaction():
            state.global_tables.observe("ADVISORIES", Observation("EU", "x", "X", ahead_ns, 1, 0, 1, None), now_ns)
        streams = [PublishedStream("ADVISORIES", None, tracked=False)]
        publish_site(tmp_path, "centre", state, streams, sites=["centre"], run=Run(now_ns, "again"))
    with open_fleet(tmp_path) as connection:
        streams = read_streams(connection, "EU", own=False)
    assert {(row["clock_ns"], row["until_ns"]) for row in streams.to_pylist()} == {(now_ns, now_ns)}
