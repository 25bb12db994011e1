"""The global view on the command line: a feed's published tables, and following real streams."""

import csv
import io
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.published.stream_status import PublishedStream
from sr_assets.adapters.range_rows import Advisories
from sr_assets.adapters.state.records import StreamState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.advisories import PROTOCOL, encode_node_event, observer_alive
from sr_assets.domain.messages import Message
from sr_assets.domain.received import Observation, read_message
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.settings import parse_cluster
from sr_assets_tests.forks import Forked
from sr_assets_tests.rig import Command

SECOND_NS = 1_000_000_000
#: The feed's clock in all these tables: 2026-01-31T12:00:00Z.
NOW = 1_769_860_800
#: Sites with heartbeats, and the age of the last one in seconds.
HEARTBEATS = (("london", 500), ("paris", 5))


def configuration(home: Path, *feeds: str, url: str = "nats://127.0.0.1:1") -> str:
    listed = "".join(f"  - {{name: centre, stream: {feed}, url: '{url}'}}\n" for feed in feeds)
    return f"name: CENTRE\nstate_store: {home}\nfeeds:\n{listed}"


def advisory(node: str, event: str, transition: int, ago: int, name: str = "london") -> bytes:
    body: dict[str, Any] = {
        "protocol": PROTOCOL,
        "event_id": f"{name}-{node}-{transition}",
        "replicator": "EAST",
        "name": name,
    }
    body |= {"stream": "NODES", "value": node, "event": event, "transition": transition, "timestamp": NOW - ago}
    return json.dumps(body | {"seen": NOW - ago - 60, "age_seconds": 60.0}).encode()


def unretired(node: str, transition: int, name: str) -> bytes:
    """Return the event of an undone retirement."""
    event = {"node": node, "event_id": "undone", "event": "unretired", "event_ns": NOW * SECOND_NS, "transitions": None}
    event |= {"stream": "NODES", "up": True, "epoch": 0, "last_transition": transition, "last_seen_ns": NOW * SECOND_NS}
    event |= {"last_event": "expire", "last_ns": NOW * SECOND_NS, "last_previous": "up"}
    return encode_node_event(event, replicator="EAST", name=name)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose feed received advisories of london (blind), paris and a Stream Replicator."""
    home = tmp_path / "home"
    file = tmp_path / "replication.yaml"
    file.write_text(configuration(home, "ADVISORIES"))
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
    monkeypatch.delenv("SR_ASSETS_HOME", raising=False)
    monkeypatch.setenv("COLUMNS", "250")
    go = {
        "protocol": PROTOCOL,
        "event_id": "go",
        "replicator": "GO",
        "value": "db1",
        "event": "new",
        "timestamp": NOW - 9,
    }
    received = [
        advisory("web1", "new", 1, 7200),
        advisory("web1", "new", 1, 7200),
        advisory("web1", "timeout", 2, 600),
        advisory("web1", "new", 1, 60, "paris"),
        advisory("web2", "new", 1, 30, "paris"),
        json.dumps(go).encode(),
        b"nonsense",
    ]
    publish(home, received)
    return home


def publish(home: Path, received: list[bytes], heartbeats: Sequence[tuple[str, int]] = HEARTBEATS) -> None:
    """Fold a feed's advisories and heartbeats, and publish the tables."""
    messages = [
        Message(index, (NOW - 3_000 + index) * SECOND_NS, "adv.x", b"", body) for index, body in enumerate(received)
    ]
    with SiteState(home / "sites" / "centre") as state:
        with state.transaction():
            watermark_ns = NOW * SECOND_NS
            state.save_stream(StreamState("ADVISORIES", 1, 8, watermark_ns=watermark_ns, as_of_ns=watermark_ns))
            state.global_tables.fold("ADVISORIES", Advisories().converter()(messages))
            for name, ago in heartbeats:
                heartbeat: dict[str, Any] = {
                    "replicator": "EAST",
                    "name": name,
                    "stream": "NODES",
                    "position": 7,
                    "lag_messages": 0,
                    "nodes": 9,
                }
                body = observer_alive(**heartbeat, ts_ns=0, watermark_ns=None, lag_ns=0, next_within_ns=90 * SECOND_NS)
                observation = read_message(body, 0)
                assert isinstance(observation, Observation)
                state.global_tables.observe("ADVISORIES", observation, (NOW - ago) * SECOND_NS)
        streams = [PublishedStream("ADVISORIES", None, tracked=False)]
        publish_site(home, "centre", state, streams, sites=["centre"], run=Run(NOW * SECOND_NS, "r"))


def rows(command: Command, *arguments: str) -> list[dict[str, Any]]:
    code, output, errors = command(*arguments, "--format", "json")
    assert (code, errors) == (0, "")
    parsed: list[dict[str, Any]] = json.loads(output)
    return parsed


def test_global_nodes_have_age_by_feed_clock(home: Path, command: Command) -> None:
    nodes = rows(command, "nodes", "--global")
    assert [(row["replicator"], row["name"], row["node"], row["status"], row["blind"]) for row in nodes] == [
        ("EAST", "london", "web1", "timeout", True),
        ("EAST", "paris", "web1", "up", False),
        ("EAST", "paris", "web2", "up", False),
        ("GO", None, "db1", "up", False),
    ]
    assert [row["age_seconds"] for row in nodes] == [660.0, 60.0, 30.0, 9.0]
    assert [row["source"] for row in nodes] == ["ours", "ours", "ours", "v2"]


@pytest.mark.parametrize(
    ("arguments", "nodes"),
    (
        (("--site", "paris"), ["web1", "web2"]),
        (("--site", "GO"), ["db1"]),
        (("--stream", "NODES", "--status", "timeout"), ["web1"]),
        (("--silent-for", "40s"), ["web1", "web1"]),
        (("--like", "*2"), ["web2"]),
        (("--site", "nowhere"), []),
    ),
)
def test_global_nodes_filters(home: Path, command: Command, arguments: tuple[str, ...], nodes: list[str]) -> None:
    assert [row["node"] for row in rows(command, "nodes", "--global", *arguments)] == nodes


def test_global_nodes_limits_tables_but_not_json(home: Path, command: Command) -> None:
    publish(home, [advisory(f"n{number:04}", "new", 1, 0) for number in range(200)])
    _, output, errors = command("nodes", "--global")
    assert "n0099" in output
    assert "n0100" not in output
    assert "web1" not in output
    assert errors == "only the first 100 nodes are shown; add filters, or use --format json or csv for all\n"
    assert len(rows(command, "nodes", "--global")) == 204


def test_node_shows_every_site_that_knows_it(home: Path, command: Command) -> None:
    london, paris = rows(command, "node", "web1")
    assert (london["name"], london["status"], paris["name"], paris["status"]) == ("london", "timeout", "paris", "up")
    assert [(event["transition"], event["event"]) for event in london["history"]] == [(1, "new"), (2, "timeout")]
    assert len(paris["history"]) == 1
    code, output, _ = command("node", "web1")
    assert code == 0
    assert "web1, at all sites" in output
    code, _, errors = command("node", "web3")
    assert (code, errors) == (3, "error: node 'web3' is unknown; did you mean 'web1' or 'web2'?\n")


def test_global_advisories_are_ordered_and_unique(home: Path, command: Command) -> None:
    advisories = rows(command, "advisories", "--global")
    assert [row["event_id"] for row in advisories] == [
        "london-web1-1",
        "london-web1-2",
        "paris-web1-1",
        "paris-web2-1",
        "go",
    ]
    assert [row["event_id"] for row in rows(command, "advisories", "--global", "--since", "5m", "--node", "web1")] == [
        "paris-web1-1"
    ]
    code, output, _ = command("advisories", "--global", "--event", "timeout", "--format", "csv")
    assert code == 0
    assert [row["node"] for row in csv.DictReader(io.StringIO(output))] == ["web1"]


def test_summary_names_blind_sites(home: Path, command: Command) -> None:
    sites = {row["name"]: row for row in rows(command, "summary")}
    assert {name: row["observer"] for name, row in sites.items()} == {
        "london": "blind",
        "paris": "ok",
        None: "unwatched",
    }
    london = sites["london"]
    assert (london["up"], london["timeout"], london["retired"], london["new_24h"]) == (0, 1, 0, 1)
    assert (london["advisories_1h"], london["advisories_24h"]) == (2, 2)
    assert (london["observer_age_seconds"], london["last_advisory_age_seconds"]) == (500.0, 2998.0)
    assert sites[None]["observer_age_seconds"] is None, "a missing heartbeat has no age"
    code, output, _ = command("summary")
    assert code == 0
    assert "3 sites (1 blind): 3 up, 1 silent, 0 retired, 4 new in 24 h; as of 2026-01-31 12:00:00" in output
    assert "blind: heartbeat overdue; node states may be stale" in output
    assert "unwatched: never sent a heartbeat" in output


def test_summary_without_reports_or_publication(home: Path, command: Command) -> None:
    shutil.rmtree(home / "sites")
    publish(home, [b"nonsense"], heartbeats=[])
    code, output, errors = command("summary")
    assert (code, errors) == (0, "")
    assert output.startswith("no site has reported yet; ")
    assert output.count("\n") == 1
    assert rows(command, "summary") == []
    (home / "fleet.duckdb").unlink()
    code, output, errors = command("summary")
    assert (code, output) == (1, "")
    assert errors.startswith("error: nothing is published yet: ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    ("summary", "nodes --global", "advisories --global", "advisories --global --follow", "summary --format json"),
)
def test_global_view_requires_feed(home: Path, command: Command, tmp_path: Path, options: str) -> None:
    stream = "streams: [{stream: A, source_url: a, target_url: b}]"
    (tmp_path / "replication.yaml").write_text(f"name: A\nstate_store: {home}\n{stream}\n")
    arguments = "summary" if "summary" in options else "--global"
    assert command(*options.split()) == (2, "", f"error: {arguments}: no feed is configured; add one to feeds\n")


def test_feed_supports_check_and_lag_but_not_recover(
    nats_server: NatsServer, unique: Callable[[str], str], command: Command, home: Path, tmp_path: Path
) -> None:
    stream = unique("FEED")
    (tmp_path / "replication.yaml").write_text(configuration(home, stream, "NOWHERE", url=nats_server.url))
    with Cluster(parse_cluster(nats_server.url)) as cluster:
        cluster.create_stream({"name": stream, "subjects": [f"{stream}.>"], "allow_direct": True})
        cluster.publish_many([(f"{stream}.a", b"{}", "1")])
    here, _ = json.loads(command("check", "--format", "json")[1])
    assert (here["name"], here["stream"], here["to"]) == ("centre", stream, "the global view")
    code, output, errors = command("check", "--connect", "--format", "json")
    tried = [(probe["stream"], probe["result"]) for probe in json.loads(output)]
    assert code == 1
    assert {result for label, result in tried if label == f"centre/{stream}"} == {"ok"}
    assert tried[-1] == ("centre/NOWHERE", "failed")
    assert "stream NOWHERE does not exist" in errors
    _, output, _ = command("lag", "--format", "json")
    assert [(row["stream"], row["lag_messages"]) for row in json.loads(output)] == [(stream, 1), ("NOWHERE", None)]
    code, _, errors = command("recover", "--stream", stream)
    assert code == 2
    assert "a feed has no state to recover" in errors
    code, _, errors = command("pause", "--stream", stream)
    assert code == 2
    assert "a feed makes no copies" in errors


def test_global_follow_reads_feed_streams(
    nats_server: NatsServer, unique: Callable[[str], str], home: Path, tmp_path: Path
) -> None:
    feeds, ids = [unique("FEED") for _ in range(2)], itertools.count()
    (tmp_path / "replication.yaml").write_text(configuration(home, *feeds, url=nats_server.url))
    with Cluster(parse_cluster(nats_server.url)) as cluster:

        def store(feed: str, *bodies: bytes) -> None:
            cluster.publish_many([(f"{feed}.a", body, str(next(ids))) for body in bodies])

        for feed in feeds:
            config = {"name": feed, "subjects": [f"{feed}.>"], "allow_direct": True}
            cluster.create_stream(config)
        store(feeds[0], advisory("web1", "new", 1, 0), b"nonsense", advisory("web1", "timeout", 2, 0))
        following = Forked(
            [
                sys.executable,
                "-m",
                "sr_assets",
                "advisories",
                "--global",
                "--follow",
                "--since",
                "1h",
                "--format",
                "json",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert following.stdout is not None
            lines = (json.loads(line) for line in following.stdout)
            assert [next(lines)["event"] for _ in range(2)] == ["new", "timeout"]
            store(feeds[1], advisory("web2", "new", 1, 0, "paris"))
            row = next(lines)
            assert (row["name"], row["node"], row["transition"], row["source"]) == ("paris", "web2", 1, "ours")
            store(feeds[0], unretired("web2", 2, "paris"))
            row = next(lines)
            assert (row["node"], row["event"], row["previous"]) == ("web2", "unretired", "retired")
        finally:
            following.kill()
            following.communicate()
