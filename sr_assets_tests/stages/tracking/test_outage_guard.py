"""The outage guard: site events, held announcements and their release, for every cut of a history."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.published.node_histories import TIMEOUT, UP, Histories, read_streams
from sr_assets.adapters.state.store import SiteState
from sr_assets.automation.observing import is_idle
from sr_assets.domain.blindness import BlindSpans
from sr_assets.domain.errors import ConfigurationError
from sr_assets.domain.tracking.rows import folded_table, node_row, node_table, transition_row
from sr_assets.domain.tracking.rules import retire
from sr_assets.operate.notify.delivery import Sent, pending
from sr_assets.stages.report import StreamReport
from sr_assets.stages.tracking.batch_rows import add_transitions
from sr_assets_tests.announcing import POLICY, SECOND, configured, fold, history, outbox, site_events
from sr_assets_tests.event_schema import unknown_or_wrong
from sr_assets_tests.examples import one_in
from sr_assets_tests.naive_rules import NaiveGuard, announced_by_guard
from sr_assets_tests.rig import SITE, Rig, wait_until
from sr_assets_tests.rig import Sent as Message
from sr_assets_tests.servers import NatsServer

WARNING = 10
NODES = tuple("abcdef")


@st.composite
def fleets(draw: st.DrawFn) -> list[tuple[int, str]]:
    """Nodes that report every few seconds, except in one silence of most of them and in silences of their own."""
    dark = draw(st.tuples(st.integers(5, 60), st.integers(5, 60)))
    sightings: set[tuple[int, str]] = set()
    for node in NODES:
        joins = draw(st.booleans()) or draw(st.booleans())
        second = draw(st.integers(0, 12))
        while second < 110:
            if not (joins and dark[0] <= second < sum(dark)):
                sightings.add((second, node))
            second += draw(st.sampled_from((2, 3, 4, 4, 5, 5, 13, 30)))
    return sorted(sightings)


@one_in(25)
@given(
    fleets(),
    st.sampled_from(((50, 100), (55, 80), (30, 30))),
    st.sampled_from((5, 3)),
    st.sampled_from((15, 40, 200)),
    st.sampled_from((3, 1, 6)),
    st.lists(st.integers(0, 130), max_size=5, unique=True),
)
def test_guard_reports_and_announces_the_same_for_every_cut(
    sightings: list[tuple[int, str]],
    shares: tuple[int, int],
    quiet: int,
    hold: int,
    min_nodes: int,
    cuts: list[int],
) -> None:
    partial, dark = shares
    guard = {
        "partial": f"{partial}%", "dark": f"{dark}%", "quiet": f"{quiet}s", "hold": f"{hold}s", "min_nodes": min_nodes
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stream = configured(folder, outage_guard=guard)
        for number, chosen in enumerate((cuts, ())):
            with SiteState(folder / str(number)) as state:
                fold(state, stream, sightings, chosen, 150)
                rows = history(state)
                naive = NaiveGuard(partial, dark, quiet, hold, min_nodes)
                naive.run(sightings, rows, 150)
                assert site_events(state) == naive.events
                assert outbox(state) == announced_by_guard(rows, naive, lambda _: WARNING, 150)
                held = state.connection.execute("SELECT count(*) FROM transitions WHERE held_by IS NOT NULL").fetchall()
                assert held[0][0] >= len(naive.holding)


@pytest.mark.parametrize("cuts", ((), range(6, 40)), ids=("one jump", "each second"))
def test_nodes_retired_by_hand_count_neither_as_up_nor_as_silent(tmp_path: Path, cuts: Sequence[int]) -> None:
    stream = configured(tmp_path, outage_guard={"partial": "60%", "quiet": "5s", "min_nodes": 2})
    with SiteState(tmp_path) as state:
        fold(state, stream, [(0, node) for node in NODES], [], 3)
        nodes, row = state.nodes("REG"), state.load_stream("REG")
        assert row is not None
        with state.transaction():
            for node in "abcd":
                known, _ = nodes.state(node) or (None, None)
                assert known is not None
                after, transitions = retire(POLICY, known, row.watermark_ns or 0, BlindSpans())
                nodes.merge(node_table([node_row(POLICY, node, after, BlindSpans())]))
                rows = folded_table([transition_row(node, each) for each in transitions])
                add_transitions(state, stream, row, rows, StreamReport(stream))
        # Only f is silent, one of two nodes.
        fold(state, stream, [(second, "e") for second in range(4, 40, 4)], cuts, 40)
        assert [row for row in history(state) if row[1] == "timeout"] == [("f", "timeout", 10)]
        assert site_events(state) == []


def test_hold_after_an_outage_lasts_the_warn_duration_of_the_class(tmp_path: Path) -> None:
    slow = [{"name": "slow", "match": "e", "warn_duration": "15s"}]
    guard = {"partial": "50%", "quiet": "5s", "hold": "1h", "min_nodes": 3}
    stream = configured(tmp_path, outage_guard=guard, classes=slow)
    sightings = sorted((second, node) for node in NODES for second in (*range(0, 21, 5), *range(55, 81, 5)))
    silent = [(second, node) for second, node in sightings if second < 50 or node not in "ef"]
    with SiteState(tmp_path) as state:
        for begin, end, nodes in ((0, 64, set()), (64, 66, {"f"}), (66, 69, {"f"}), (69, 71, {"e", "f"})):
            fold(state, stream, [each for each in silent if each[0] >= begin], range(max(begin, 50), end), end)
            assert site_events(state)[-1][:2] == ("restored", 55)
            assert {row[0] for row in outbox(state) if row[1] == "timeout"} == nodes


def test_quiet_time_must_be_shorter_than_that_of_each_class(tmp_path: Path) -> None:
    fast = [{"name": "fast", "match": "e", "warn_duration": "4s"}]
    with pytest.raises(ConfigurationError, match=r"quiet: 5s is not shorter than warn_duration of class 'fast' \(4s\)"):
        configured(tmp_path, outage_guard={"quiet": "5s"}, classes=fast)
    guard = configured(tmp_path, outage_guard={}, classes=fast).guard
    assert guard is not None
    assert (guard.quiet_of("fast"), guard.quiet_of(None)) == (2 * SECOND, 5 * SECOND)


@pytest.mark.parametrize(
    ("guard", "problem"),
    (
        ({"partial": "0%"}, "partial: '0%' is not a percentage; use more than 0% and at most 100%"),
        ({"partial": "155%"}, "partial: '155%' is not a percentage"),
        ({"dark": "most"}, "dark: 'most' is not a percentage"),
        ({"dark": "inf"}, "dark: 'inf' is not a percentage"),
        ({"partial": "60%", "dark": "50%"}, "outage_guard: dark: 50% is below partial; use at least 60%"),
        ({"quiet": "10s"}, "outage_guard: quiet: 10s is not shorter than warn_duration (10s); use"),
    ),
)
def test_guard_refuses_a_setting_in_one_line(tmp_path: Path, guard: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        configured(tmp_path, outage_guard=guard)
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def send(rig: Rig, stream: str, nodes: Sequence[str]) -> None:
    """Let nodes report."""
    rig.publish(stream, [Message(json.dumps({"sender": node}).encode()) for node in nodes])


def test_dark_site_sends_one_event_and_only_lost_nodes(rig: Rig) -> None:
    """The centre shows the site dark meanwhile; a node that stays away is announced with its true time."""
    stream, advisories = rig.make(), rig.unique("ADV")
    rig.create(
        advisories,
        subjects=[
            f"{advisories}.>",
            f"sr_assets.*.*.{SITE}.{SITE}.{stream}",
            f"sr_assets.observer_alive.{SITE}.{SITE}.{stream}",
        ],
    )
    nodes = [f"web{number}" for number in range(5)]
    send(rig, stream, nodes)
    short = {"inspect_field": "sender", "inspect_duration": "9h", "warn_duration": "1h"}
    rig.add(stream, advisory={"subject": f"{advisories}.%s.%v"}, outage_guard={"min_nodes": 5}, **short)
    rig.add_feed(advisories, url=rig.source.url)
    rig.drain()
    rig.travel(hours=2)
    rig.drain()
    rig.drain()
    dark = {"event": "dark", "nodes": 5, "silent": 5}
    configuration = rig.settings(notify=[{"name": "all", "webhook": "http://127.0.0.1:9/"}])
    (notice,) = pending(configuration, configuration.notify[0], progress := Sent())
    assert notice.text.startswith(f"{SITE}/{stream} is dark: 5 of 5 nodes are silent (")
    progress.add([notice])
    assert rig.rows("SELECT event, nodes, silent FROM site_events") == [dark]
    assert rig.rows("SELECT outage FROM site_summary") == [{"outage": "dark"}]
    assert rig.rows("SELECT outage, up FROM global_summary WHERE outage IS NOT NULL") == [{"outage": "dark", "up": 5}]
    assert rig.rows("SELECT DISTINCT event FROM node_advisories WHERE held_by IS NOT NULL") == [{"event": "timeout"}]
    send(rig, stream, nodes[1:])
    rig.drain()
    rig.travel(hours=2)
    send(rig, stream, nodes[1:])
    rig.drain()
    rig.drain()
    events = rig.rows("SELECT event, silent, published_at IS NOT NULL AS sent FROM site_events ORDER BY event_time")
    assert [(row["event"], row["silent"], row["sent"]) for row in events][:2] == [
        ("dark", 5, True),
        ("restored", 2, True),
    ]
    notices = [event.text.split(" (")[0] for event in pending(configuration, configuration.notify[0], progress)]
    assert notices.count(f"{SITE}/{stream} reports again: 2 of 5 nodes are silent") == 1
    assert "web0 is silent after 3600 s" in notices
    assert [problem for message in rig.stored(advisories) for problem in unknown_or_wrong(message.payload)] == []
    bodies = [json.loads(message.payload) for message in rig.stored(advisories)]
    web0 = [body for body in bodies if body.get("value") == "web0"]
    assert [body["event"] for body in web0] == ["new", "timeout"]
    (row,) = rig.rows(
        "SELECT event_time, held_by, event_id FROM node_advisories WHERE node = 'web0' AND event = 'timeout'"
    )
    assert web0[1]["event_id"] == row["event_id"]
    assert row["held_by"] == rig.rows("SELECT outage FROM site_events ORDER BY event_time LIMIT 1")[0]["outage"]
    assert rig.rows("SELECT outage FROM global_summary WHERE outage IS NOT NULL") == []
    # Availability counts the silence of a node that came back unannounced.
    with open_fleet(rig.home) as connection:
        histories = Histories(connection, read_streams(connection, SITE, own=True))
        query = "SELECT after FROM changes WHERE node = 'web1' ORDER BY event_ns, transition"
        statuses = [status for (status,) in histories.connection.execute(query).fetchall()]
    assert statuses[:3] == [UP, TIMEOUT, UP]
    assert [body["event"] for body in bodies if body.get("value") == "web1"][:1] == ["new"]


def test_denied_site_event_delays_no_advisory_and_is_shown(rig: Rig, tmp_path: Path) -> None:
    permissions = '{ publish: { deny: "sr_assets.site.>" } }'
    users = f"{{ user: all, password: all }}, {{ user: me, password: p, permissions: {permissions} }}"
    config = f"authorization {{ users: [ {users} ] }}\nno_auth_user: all\n"
    with NatsServer(tmp_path / "guarded", "guarded", config=config) as server:
        rig.source = server
        stream, advisories = rig.make(), rig.make("ADV")
        send(rig, stream, [f"web{number}" for number in range(5)])
        short = {"inspect_field": "sender", "inspect_duration": "9h", "warn_duration": "1h"}
        url = f"nats://me:p@{server.address}"
        advisory = {"subject": f"{advisories}.%s.%v"}
        rig.add(stream, source_url=url, advisory=advisory, outage_guard={"min_nodes": 5}, **short)
        rig.drain()
        rig.travel(hours=2)
        rig.drain()
        send(rig, stream, ["fresh"])

        def announced() -> set[tuple[str, str]]:
            bodies = [json.loads(message.payload) for message in rig.stored(advisories)]
            return {(body["value"], body["event"]) for body in bodies}

        wait_until(lambda: bool(rig.drain()) and ("fresh", "new") in announced(), "the advisory of the new node")
        (report,) = rig.drain().values()
        assert (report.failure, report.waiting) == (None, 1)
        assert 'publish to "sr_assets.site.dark.' in (report.undeliverable_event or "")
        assert rig.rows("SELECT event, published_at FROM site_events") == [{"event": "dark", "published_at": None}]
        assert not is_idle(rig.settings(), SITE), "a quiet `run --once` would not try again"
