"""Maintenance windows: what is announced, and when, for every cut of a history."""

import json
import re
import shutil
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters.published.manifest import is_published
from sr_assets.adapters.published.publication import publication_folder
from sr_assets.adapters.state.schema import TABLES
from sr_assets.adapters.state.store import SiteState
from sr_assets.adapters.state.transitions import Undecided
from sr_assets.domain.errors import ConfigurationError
from sr_assets.domain.messages import LAST_NS
from sr_assets.domain.tracking.announcements import NodeAnnouncements
from sr_assets.domain.tracking.maintenance import Window, suppression
from sr_assets.operate.notify.delivery import Sent, pending
from sr_assets.stages.report import StreamReport
from sr_assets.stages.tracking.node_state import sweep_due
from sr_assets_tests.announcing import (
    BEGIN_NS,
    POLICY,
    SECOND,
    at,
    configured,
    fold,
    history,
    outbox,
)
from sr_assets_tests.examples import one_in
from sr_assets_tests.naive_rules import announced_in_windows
from sr_assets_tests.rig import SITE, Rig
from sr_assets_tests.rig import Sent as Message

NODES = ("web1", "web2", "db1")


seconds = st.integers(0, 100)
spans = st.tuples(st.sampled_from(("*", "web*")), seconds, st.integers(1, 40)).map(lambda x: (x[0], x[1], x[1] + x[2]))


@one_in(25)
@given(
    st.lists(st.tuples(seconds, st.sampled_from(NODES)), min_size=1, max_size=25, unique=True).map(sorted),
    st.lists(spans, max_size=3),
    st.lists(seconds, max_size=4, unique=True),
)
def test_maintenance_announces_the_same_for_every_cut(
    sightings: list[tuple[int, str]], windows: list[tuple[str, int, int]], cuts: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stream = configured(folder, *({"match": glob, "from": at(a), "to": at(b)} for glob, a, b in windows))
        results = []
        for number, chosen in enumerate((cuts, ())):
            with SiteState(folder / str(number)) as state:
                fold(state, stream, sightings, chosen, 130)
                results.append(outbox(state))
                rows = history(state)
        assert results[0] == results[1] == announced_in_windows(rows, windows, 130)


@pytest.mark.parametrize("days", (1, 366, 106_751))
def test_joined_windows_end_at_the_latest_with_the_last_time(days: int) -> None:
    window = Window("long", cron="0 0 * * *", length_ns=days * 86_400 * SECOND)
    suppressed = suppression([window], "web1", None, "timeout", BEGIN_NS)
    assert suppressed is not None
    assert BEGIN_NS < suppressed[1] <= LAST_NS


def test_maintenance_announces_a_silent_node_only_at_the_end(tmp_path: Path) -> None:
    stream = configured(tmp_path, {"match": ["web*"], "from": at(5), "to": at(15)})
    with SiteState(tmp_path / "state") as state:
        fold(state, stream, [(0, "web1"), (0, "web2"), (0, "db1"), (12, "web2")], [], 14)
        assert outbox(state) == [("db1", "new", 0), ("web1", "new", 0), ("web2", "new", 0), ("db1", "timeout", 10)]
        assert state.nodes("REG").next_deadline() == BEGIN_NS + 15 * SECOND
        fold(state, stream, [], [], 16)
        assert outbox(state)[3:] == [("db1", "timeout", 10), ("web1", "timeout", 10)]
        query = "SELECT node, event, suppressed_by FROM transitions WHERE suppressed_by IS NOT NULL ORDER BY ALL"
        (window,) = stream.windows
        held = [("web1", "timeout"), ("web2", "recover"), ("web2", "timeout")]
        assert state.connection.execute(query).fetchall() == [(*row, window.id) for row in held]


def test_maintenance_selects_nodes_by_class(tmp_path: Path) -> None:
    classes = [{"name": "web", "match": "web*"}, {"name": "db", "match": "db*"}]
    span = {"from": at(5), "to": at(50)}
    sightings = [(0, "web1"), (0, "web2"), (0, "db1"), (0, "x1"), (12, "web2")]
    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({"class": "web"}, {"web1", "web2"}),
        ({"class": ["web", "db"]}, {"web1", "web2", "db1"}),
        ({"class": "web", "match": "*2"}, {"web2"}),
    ]
    for number, (window, held) in enumerate(cases):
        stream = configured(tmp_path, {**window, **span}, classes=classes)
        with SiteState(tmp_path / str(number)) as state:
            fold(state, stream, sightings, [], 40)
            query = "SELECT DISTINCT node FROM transitions WHERE suppressed_by IS NOT NULL"
            assert {node for (node,) in state.connection.execute(query).fetchall()} == held
            assert {node for node, event, _ in outbox(state) if event != "new"} == {"web1", "web2", "db1", "x1"} - held


def test_maintenance_ends_at_the_next_run_when_a_window_is_removed(tmp_path: Path) -> None:
    stream = configured(tmp_path, {"from": at(5), "to": at(900)})
    with SiteState(tmp_path / "state") as state:
        fold(state, stream, [(0, "web1")], [], 12)
        assert outbox(state) == [("web1", "new", 0)]
        stream = configured(tmp_path)
        sweep_due(state, stream, POLICY, StreamReport(stream))
        assert outbox(state) == [("web1", "new", 0), ("web1", "timeout", 10)]


def test_suppressed_transitions_are_read_again_only_for_other_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    suppressed = Undecided.suppressed

    def counted(self: Undecided) -> list[NodeAnnouncements]:
        reads.append("read")
        return suppressed(self)

    monkeypatch.setattr(Undecided, "suppressed", counted)
    stream = configured(tmp_path, {"from": at(5), "to": at(900)})
    with SiteState(tmp_path / "state") as state:
        fold(state, stream, [(0, "web1"), (0, "web2")], range(1, 40), 40)
        for _ in range(3):
            sweep_due(state, stream, POLICY, StreamReport(stream))
        assert len(reads) == 1
        stream = configured(tmp_path)
        for _ in range(3):
            sweep_due(state, stream, POLICY, StreamReport(stream))
        assert len(reads) == 2
        assert {row[:2] for row in outbox(state)} > {("web1", "expire"), ("web2", "expire")}


@pytest.mark.parametrize(
    "rule",
    (
        pytest.param({}, id="window"),
        pytest.param({"outage_guard": {"min_nodes": 1}}, id="guard"),
        # Both hold an announcement as the guard does.
        pytest.param({"flapping": {"transitions": 2, "within": "1m"}}, id="flapping", marks=pytest.mark.nightly),
        pytest.param({"recover_after": "5s"}, id="recovery", marks=pytest.mark.nightly),
    ),
)
def test_no_rule_announces_a_class_without_announcements(tmp_path: Path, rule: dict[str, Any]) -> None:
    quiet = [{"name": "quiet", "match": "web*", "announce": False}]
    stream = configured(tmp_path, {"from": at(10), "to": at(60)}, classes=quiet, **rule)
    sightings = [(second, node) for second in (5, 30, 70) for node in NODES]
    with SiteState(tmp_path) as state:
        fold(state, stream, sightings, range(5, 150, 5), 150)
        assert {row[0] for row in outbox(state)} == {"db1"}
        assert {row[:2] for row in history(state)} >= {("web1", "timeout"), ("web1", "expire")}
        assert {event["node"] for event in state.undecided("REG").unpublished()} <= {"db1"}
        query = "SELECT DISTINCT node FROM transitions WHERE withheld IS NOT TRUE OR announced_ns IS NOT NULL"
        assert state.connection.execute(query).fetchall() == [("db1",)]


def test_undone_retirement_is_never_announced(tmp_path: Path) -> None:
    stream = configured(tmp_path, {"from": at(10), "to": at(60)})
    with SiteState(tmp_path) as state:
        fold(state, stream, [(5, "web1")], (), 40)
        ((number,),) = state.connection.execute("SELECT transition FROM transitions WHERE event = 'expire'").fetchall()
        with state.transaction():
            state.outbox("REG").undo("web1", number, BEGIN_NS + 40 * SECOND)
            row = state.load_stream("REG")
            assert row is not None
            row.watermark_ns = BEGIN_NS + 100 * SECOND
            state.save_stream(row)
        sweep_due(state, stream, POLICY, StreamReport(stream))
        assert outbox(state) == [("web1", "new", 5), ("web1", "timeout", 15)]
        assert not state.undecided("REG").any()


def test_purge_waits_for_a_suppressed_transition(tmp_path: Path) -> None:
    stream = configured(tmp_path, {"from": at(10), "to": at(60)})
    with SiteState(tmp_path) as state:
        fold(state, stream, [(5, "web1")], (), 40)
        # Announced, so that only the window keeps the node.
        state.outbox("REG").mark_published([row["event_id"] for row in state.outbox("REG").unpublished(9)], BEGIN_NS)
        assert state.nodes("REG").purge_retired(BEGIN_NS + 90 * SECOND) == 0
        fold(state, stream, [], (), 61)
        assert [row[:2] for row in outbox(state)] == [("web1", "expire")]


def test_cron_windows_cover_their_length_from_each_start(tmp_path: Path) -> None:
    (window,) = configured(tmp_path, {"cron": "0 2 * * 6", "for": "90m"}).windows
    start_ns = BEGIN_NS + 7_200 * SECOND
    for days, expected_end in ((0, True), (1, False), (7, True)):
        begin_ns = start_ns + days * 86_400 * SECOND
        ends = [window.end_ns(begin_ns + offset) for offset in (-1, 0, 5_400 * SECOND - 1, 5_400 * SECOND)]
        end = begin_ns + 5_400 * SECOND if expected_end else None
        assert ends == [None, end, end, None]


@pytest.mark.parametrize(
    ("window", "problem"),
    (
        ({"cron": "0 0 31 2 *", "for": "1h"}, "cron: '0 0 31 2 *' never fires"),
        ({"cron": "often", "for": "1h"}, "cron: 'often' is not a cron expression"),
        ({"cron": "0 0 * * *"}, "needs from and to, or cron and for"),
        ({"from": at(0)}, "needs from and to, or cron and for"),
        ({"from": at(0), "to": at(9), "cron": "0 0 * * *", "for": "1h"}, "needs from and to, or cron and for"),
        ({"from": at(9), "to": at(9)}, "to: 2026-01-03T00:00:09Z is not after from (2026-01-03T00:00:09Z)"),
    ),
)
def test_maintenance_refuses_a_window_in_one_line(tmp_path: Path, window: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"maintenance.*{re.escape(problem)}.*;") as raised:
        configured(tmp_path, window)
    assert "\n" not in str(raised.value)


def test_entry_windows_replace_those_of_the_top_level(tmp_path: Path) -> None:
    once = {"from": at(0), "to": at(1)}
    with pytest.raises(ConfigurationError, match=r"maintenance: site: 'par\*' matches no site; sites: london"):
        configured(tmp_path, {**once, "site": "par*"})
    web = [{"name": "web", "match": "web*"}]
    problem = "maintenance: class: 'wbe' is not a class of these streams; did you mean 'web'? classes: web"
    for keys in ({"maintenance": [{**once, "class": "wbe"}]}, {"top": {"maintenance": [{**once, "class": "wbe"}]}}):
        with pytest.raises(ConfigurationError) as raised:
            configured(tmp_path, classes=web, **keys)
        assert problem in str(raised.value)
    assert len(configured(tmp_path, {**once, "site": "lon*"}, once).windows) == 2
    assert not configured(tmp_path, once, maintenance=[]).windows


def test_state_without_the_columns_gets_them_when_opened(tmp_path: Path) -> None:
    with SiteState(tmp_path) as state:
        columns = state.connection.execute("DESCRIBE transitions").fetchall()
    with duckdb.connect(str(tmp_path / "state.duckdb")) as connection:
        for column in TABLES["transitions"].added[TABLES["transitions"].added.index("suppressed_by") :]:
            connection.execute(f"ALTER TABLE transitions DROP COLUMN {column}")
    with SiteState(tmp_path) as state:
        assert state.connection.execute("DESCRIBE transitions").fetchall() == columns


def test_maintenance_delays_a_stored_advisory_until_its_end(rig: Rig) -> None:
    stream, advisories = rig.make(), rig.make("ADV", duplicate_window=100_000_000)
    rig.publish(stream, [Message(json.dumps({"sender": name}).encode()) for name in ("web1", "db1")])
    stored_ns = rig.stored(stream)[-1].stored_ns
    begin = datetime.fromtimestamp(stored_ns // SECOND, UTC)
    window = {"match": "web*", "from": f"{begin:%FT%TZ}", "to": f"{begin + timedelta(hours=6):%FT%TZ}"}
    short = {"inspect_field": "sender", "inspect_duration": "12h", "warn_duration": "1h"}
    rig.add(stream, advisory={"subject": f"{advisories}.%s.%v"}, maintenance=[window], **short)
    rig.drain()
    rig.travel(hours=3)
    rig.drain()
    assert announced(rig, advisories) == [("web1", "new"), ("db1", "new"), ("db1", "timeout")]
    configuration = rig.settings(notify=[{"name": "all", "webhook": "http://127.0.0.1:9/", "events": ["timeout"]}])
    sent = Sent()
    first = pending(configuration, configuration.notify[0], sent)
    assert [event.node for event in first] == ["db1"]
    sent.add(first)
    state, older = rig.home / "sites" / SITE / "state.duckdb", rig.home / "older.duckdb"
    shutil.copy(state, older)
    rig.travel(hours=5)
    rig.drain()
    assert announced(rig, advisories)[3:] == [("web1", "timeout")]
    shutil.copy(older, state)  # an older state of the site
    rig.drain()
    assert announced(rig, advisories)[3:] == [("web1", "timeout")]
    assert [event.node for event in pending(configuration, configuration.notify[0], sent)] == ["web1"]
    rows = rig.rows(
        "SELECT node, event FROM node_advisories WHERE suppressed_by IS NOT NULL AND published_at IS NOT NULL"
    )
    assert rows == [{"node": "web1", "event": "timeout"}]


def announced(rig: Rig, advisories: str) -> list[tuple[str, str]]:
    bodies = [json.loads(message.payload) for message in rig.stored(advisories)]
    return [(body["value"], body["event"]) for body in bodies]


def test_publication_without_the_column_is_written_again(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Message(json.dumps({"sender": "web1"}).encode())])
    rig.add(stream, inspect_field="sender", inspect_duration="1h")
    rig.drain()
    folder = publication_folder(rig.home, SITE)
    note = folder / "publication.json"
    content = json.loads(note.read_text())
    for name in content["files"]["node_advisories"]:
        file, older = folder / name, folder / "older"
        duckdb.sql(f"COPY (SELECT * EXCLUDE suppressed_by FROM '{file}') TO '{older}' (FORMAT parquet)")
        older.replace(file)
        content["files"]["node_advisories"][name] = file.stat().st_size
    del content["columns"]
    note.write_text(json.dumps(content))
    assert not is_published(rig.home, SITE)
    rig.drain()
    assert rig.rows("SELECT node, suppressed_by FROM node_advisories") == [{"node": "web1", "suppressed_by": None}]
