"""`topology plan`, `apply` and `adopt` on real servers, with drift and partial failures."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sr_assets.domain.topology.wanted import OWNER
from sr_assets.settings import load_settings
from sr_assets.stages.topology.evaluation import topology_lock
from sr_assets_tests.linked import ask, make, publish
from sr_assets_tests.nats_cluster import NatsCluster
from sr_assets_tests.rig import Command, wait_until
from sr_assets_tests.servers import NatsServer
from sr_assets_tests.stages.topology.conftest import Configure

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsCluster]:
    with NatsCluster(tmp_path_factory.mktemp("trio"), "trio") as cluster:
        yield cluster


def rows(command: Command, *arguments: str) -> list[dict[str, Any]]:
    """Return the rows of a successful `topology …` command."""
    code, out, err = command("topology", *arguments, "--format", "json")
    assert code == 0, err
    return list(json.loads(out))


def info(server: NatsServer, stream: str) -> dict[str, Any]:
    return ask(server, f"$JS.API.STREAM.INFO.{stream}")


def test_apply_builds_an_archive_of_two_streams_and_its_mirror(
    trio: NatsCluster, configure: Configure, command: Command, tmp_path: Path
) -> None:
    archive = {"stream": "ARCHIVE", "replicas": 3, "sources": [{"stream": "ORDERS"}, {"stream": "RETURNS"}]}
    report = {"stream": "REPORT", "replicas": 1, "mirror": {"stream": "ARCHIVE"}, "max_age": "30d"}
    origins = [{"stream": name, "replicas": 3, "subjects": [f"{name.lower()}.>"]} for name in ("ORDERS", "RETURNS")]
    topology = {"manage": "reconcile", "clusters": {"trio": {"url": trio.url}}, "streams": [report, archive, *origins]}
    configure(topology=topology)
    assert {row["stream"]: row["action"] for row in rows(command, "plan")} == dict.fromkeys(
        ("ORDERS", "RETURNS", "ARCHIVE", "REPORT"), "create"
    )
    results = rows(command, "apply")
    assert [(row["stream"], row["result"], row["detail"]) for row in results] == [
        (name, "done", None) for name in ("ORDERS", "RETURNS", "ARCHIVE", "REPORT")
    ]
    server = trio.servers[0]
    for subject, count in (("orders.new", 120), ("returns.new", 80)):
        publish(server, subject, count)

    def links() -> list[Any]:
        reported = json.loads(command("report", "--format", "json")[1])["links"]
        return [(link["stream"], link["origin_stream"], link["lag_messages"], link["dead"]) for link in reported]

    caught_up = [("ARCHIVE", "ORDERS", 0, False), ("ARCHIVE", "RETURNS", 0, False), ("REPORT", "ARCHIVE", 0, False)]
    wait_until(
        lambda: links() == caught_up and info(server, "REPORT")["state"]["messages"] == 200,
        "all 200 messages in the mirror",
    )
    streams = {stream["stream"]: stream for stream in json.loads(command("report", "--format", "json")[1])["streams"]}
    assert (streams["ARCHIVE"]["replicas"], streams["REPORT"]["replicas"]) == (3, 1)
    assert streams["ARCHIVE"]["leader"] == trio.leader("ARCHIVE").name
    assert streams["ARCHIVE"]["messages"] == 200
    assert "RAFT Leader Report" in command("report", "--leaders")[1]
    command("report", "--dot", str(tmp_path / "graph.dot"))
    edges = [line for line in (tmp_path / "graph.dot").read_text().splitlines() if "->" in line]
    assert sorted(line.partition("color=")[2].split('"')[1] for line in edges) == ["blue", "green", "green"]
    assert rows(command, "apply") == []
    assert "as configured" in command("topology", "apply")[1]

    edited = info(server, "ARCHIVE")["config"] | {"max_msgs": 1_000, "sources": [{"name": "ORDERS"}]}
    assert "error" not in ask(server, "$JS.API.STREAM.UPDATE.ARCHIVE", edited)
    drift = {(row["key"], row["wanted"], row["found"], row["remedy"]) for row in rows(command, "plan")}
    assert drift == {("max_msgs", "-1", "1000", "updatable"), ("sources", "RETURNS", None, "updatable")}
    assert [row["result"] for row in rows(command, "apply")] == ["done"]
    assert rows(command, "plan") == []

    # Two names for one JetStream, as for clusters linked by gateways.
    clusters = {f"c{number}": {"url": server.url} for number, server in enumerate(trio.servers)}
    twice = [{**origins[0], "cluster": name} for name in ("c1", "c2")]
    configure(topology={"manage": "create", "clusters": clusters, "streams": [*twice, {**report, "cluster": "c0"}]})
    shown = json.loads(command("report", "--format", "json")[1])
    listed = {stream["stream"]: stream["cluster"] for stream in shown["streams"]}
    assert len(listed) == len(shown["streams"]), "a stream is listed twice"
    assert (listed["ORDERS"], listed["RETURNS"], listed["REPORT"]) == ("c1", "c0", "c0")
    origin_clusters = {link["origin_stream"]: link["origin_cluster"] for link in shown["links"]}
    assert origin_clusters == {"ORDERS": "c1", "RETURNS": "c0", "ARCHIVE": "c0"}
    assert len(shown["links"]) == 3
    code, _, err = command("topology", "plan")
    assert code == 1
    assert "c2/ORDERS: is c1/ORDERS: c2 and c1 are one JetStream" in err


def test_next_apply_completes_a_partial_failure(
    nats_server: NatsServer, configure: Configure, command: Command, unique: Callable[[str], str]
) -> None:
    origin, copy, other = unique("O"), unique("C"), unique("P")
    streams: list[dict[str, Any]] = [
        {"stream": origin, "subjects": [origin], "replicas": 3},
        {"stream": copy, "mirror": {"stream": origin}},
        {"stream": other, "subjects": [other]},
    ]
    topology = {"manage": "create", "clusters": {"here": {"url": nats_server.url}}, "streams": streams}
    configure(topology=topology)
    code, out, _ = command("topology", "apply", "--format", "json")
    assert code == 1
    results = {row["stream"]: (row["result"], row["detail"]) for row in json.loads(out)}
    assert results[origin][0] == "failed"
    assert "replicas" in results[origin][1]
    assert results[copy] == ("not done", f"it copies from here/{origin}")
    assert results[other] == ("done", None)
    streams[0]["replicas"] = 1
    configure(topology=topology)
    assert [row["stream"] for row in rows(command, "apply")] == [origin, copy]
    assert rows(command, "apply") == []


def test_apply_refuses_an_impossible_plan_without_changes(
    nats_server: NatsServer, configure: Configure, command: Command, unique: Callable[[str], str]
) -> None:
    fine, copy, missing = unique("F"), unique("C"), unique("G")
    streams = [{"stream": fine, "subjects": [fine]}, {"stream": copy, "sources": [{"stream": missing}]}]
    topology = {"clusters": {"here": {"url": nats_server.url}}, "streams": streams}
    configure(topology=topology)
    assert command("topology", "apply")[0] == 2
    configure(topology={**topology, "manage": "create"})
    code, _, err = command("topology", "apply")
    assert code == 1
    assert f"here/{missing} does not exist" in err
    assert "no stream was changed" in err
    assert "error" in info(nats_server, fine)


def test_foreign_stream_is_changed_only_after_adopt(
    nats_server: NatsServer, configure: Configure, command: Command, unique: Callable[[str], str]
) -> None:
    stream = unique("S")
    make(nats_server, stream, subjects=[stream], storage="memory", max_age=90 * 10**9)
    publish(nats_server, stream, 3)
    wanted = {"stream": stream, "subjects": [stream], "storage": "file", "max_age": "1m"}
    configure(topology={"manage": "reconcile", "clusters": {"here": {"url": nats_server.url}}, "streams": [wanted]})
    (left,) = {(row["result"], row["detail"]) for row in rows(command, "apply", "--recreate", stream)}
    assert left == ("left", "has no owner; adopt it with `topology adopt`")
    assert [row["action"] for row in rows(command, "adopt")] == ["adopt"]
    assert info(nats_server, stream)["config"]["metadata"][OWNER] == "CENTRE"
    assert info(nats_server, stream)["config"]["max_age"] == 90 * 10**9
    results = rows(command, "apply")
    assert [(row["action"], row["result"]) for row in results] == [("update", "done"), ("update", "left")]
    assert f"--recreate here/{stream}" in results[1]["detail"]
    assert info(nats_server, stream)["state"]["messages"] == 3
    assert [(row["action"], row["result"]) for row in rows(command, "apply", "--recreate", stream)] == [
        ("recreate", "done")
    ]
    assert info(nats_server, stream)["config"]["storage"] == "file"
    assert rows(command, "plan") == []


def test_missing_permissions_are_reported_before_any_deletion(
    tmp_path: Path, configure: Configure, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = '["$JS.API.STREAM.DELETE.KEPT", "$JS.API.STREAM.CREATE.NEW"]'
    users = f"{{ user: us, password: s3cret, permissions: {{ publish: {{ deny: {denied} }} }} }}, {{ user: root, password: r }}"
    guard = f"authorization {{ users: [ {users} ] }}"
    with NatsServer(tmp_path / "guarded", "guarded", config=guard) as server:
        streams: list[dict[str, Any]] = [{"stream": name, "subjects": [name]} for name in ("KEPT", "FREE")]
        here = {"url": f"nats://us:s3cret@{server.address}"}
        topology = {"manage": "reconcile", "clusters": {"here": here}, "streams": streams}
        configure(topology=topology)
        assert [row["result"] for row in rows(command, "apply")] == ["done", "done"]
        for wanted, refusal in (
            ({"stream": "KEPT", "storage": "memory"}, "STREAM.DELETE.KEPT"),
            ({"stream": "FREE", "storage": "memory", "replicas": 3}, "replicas > 1 not supported"),
        ):
            configure(topology={**topology, "streams": [{**wanted, "subjects": [wanted["stream"]]}]})
            code, _, err = command("topology", "apply", "--recreate", str(wanted["stream"]))
            assert code == 1
            assert refusal.lower() in err.lower()
            assert "no stream was changed" in err
        configure(topology=topology)
        assert rows(command, "plan") == []

        new = {"stream": "NEW", "mirror": {"stream": "KEPT", "api_prefix": "$JS.away.API"}}
        clusters = {"here": here, "gone": {"url": "127.0.0.1:1"}}
        configure(topology={**topology, "clusters": clusters, "streams": [{**new, "cluster": "here"}]})
        code, out, err = command("check", "--connect", "--format", "json")
        assert code == 1
        tried = {(row["stream"], row["tried"]): row["result"] for row in json.loads(out)}
        assert tried["topology here", "connect"] == tried["topology here", "$JS.API.INFO"] == "ok"
        assert tried["topology here", "$JS.API.STREAM.UPDATE.NEW"] == "ok"
        assert {key for key, result in tried.items() if result != "ok"} == {
            ("topology here", "$JS.API.STREAM.CREATE.NEW"),
            ("topology here", "$JS.away.API.STREAM.INFO.KEPT"),
            ("topology gone", "connect"),
            ("here", "publish $JS.API.STREAM.CREATE.NEW"),
        }
        assert "the route from here/NEW to here/KEPT is closed" in err

        monkeypatch.setattr("sr_assets.cli.topology._LOCK_WAIT_SECONDS", 0.2)
        with topology_lock(load_settings(), "run 7", 0):
            code, _, err = command("topology", "apply")
        assert code == 1
        assert err.count("\n") == 1
        assert "the native streams are locked by run 7" in err


def test_apply_creates_and_seals_a_stream_with_every_permission(
    trio: NatsCluster, configure: Configure, command: Command
) -> None:
    server = trio.servers[0]
    stream = {"stream": "KEYS", "subjects": ["keys.>"], "deny_delete": True, "allow_rollup": True, "max_consumers": 4}
    topology = {"manage": "reconcile", "clusters": {"trio": {"url": trio.url}}, "streams": [stream]}
    configure(topology=topology)
    assert [(row["result"], row["detail"]) for row in rows(command, "apply")] == [("done", None)]
    config = info(server, "KEYS")["config"]
    keys = ("deny_delete", "deny_purge", "allow_rollup_hdrs", "max_consumers", "sealed")
    assert [config.get(key, False) for key in keys] == [True, False, True, 4, False]
    assert rows(command, "plan") == []
    closed = {"stream": "CLOSED", "subjects": ["closed.>"], "sealed": True}
    configure(topology={**topology, "streams": [{**stream, "sealed": True}, closed]})
    assert [(row["result"], row["detail"]) for row in rows(command, "apply")] == [("done", None)] * 2
    assert all(info(server, name)["config"]["sealed"] is True for name in ("KEYS", "CLOSED"))
    assert rows(command, "plan") == []
