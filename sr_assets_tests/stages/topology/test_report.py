"""`report` on real servers: true lag, dead links, and unreachable clusters."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sr_assets_tests.linked import Linked, ask, linked, make, publish
from sr_assets_tests.rig import Command, wait_until
from sr_assets_tests.server_versions import server_binary
from sr_assets_tests.servers import NatsServer
from sr_assets_tests.stages.topology.conftest import Configure

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Linked]:
    with linked(tmp_path_factory.mktemp("linked")) as servers:
        yield servers


def links_of(command: Command, *options: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the current links of `report` by stream, kind and origin."""
    code, out, err = command("report", "--format", "json", *options)
    assert code == 0, err
    return {(link["stream"], link["kind"], link["origin_stream"]): link for link in json.loads(out)["links"]}


def test_cut_link_is_dead_with_its_true_lag(
    pair: Linked, configure: Configure, command: Command, tmp_path: Path
) -> None:
    make(pair.city, "ORDERS", subjects=["orders.>"])
    make(pair.city, "RETURNS", subjects=["returns.>"])
    make(pair.hub, "LOCAL", subjects=["local"])
    city = {"api": "$JS.city.API", "deliver": ""}
    make(pair.hub, "ORDERS", mirror={"name": "ORDERS", "external": city})
    sources = [{"name": "ORDERS", "filter_subject": "orders.a", "external": city}, {"name": "LOCAL"}]
    make(pair.hub, "ALL", sources=sources)
    publish(pair.city, "orders.a", 10)
    publish(pair.city, "orders.b", 10)
    publish(pair.hub, "local", 3)
    copied = {"stream": "RETURNS", "source_url": pair.city.url, "target_url": pair.hub.url, "target_stream": "COPIES"}
    configure(
        topology={"clusters": pair.clusters},
        streams=[{**copied, "target_subject_prefix": "city"}],
        feeds=[{"stream": "LOCAL", "url": pair.hub.url}],
    )

    def lags() -> list[Any]:
        links = links_of(command)
        keys = (("ORDERS", "mirror", "ORDERS"), ("ALL", "source", "ORDERS"), ("ALL", "source", "LOCAL"))
        return [(links[key]["lag_messages"], links[key]["dead"]) for key in keys]

    wait_until(lambda: lags() == [(0, False)] * 3, "all links to catch up")
    mirror = links_of(command)["ORDERS", "mirror", "ORDERS"]
    assert (mirror["cluster"], mirror["origin_cluster"], mirror["api_prefix"]) == ("hub", "city", "$JS.city.API")
    assert links_of(command)["COPIES", "replica", "RETURNS"]["transforms"] == "prefix city"
    assert links_of(command)["CENTRE/LOCAL/advisory_feed", "feed", "LOCAL"]["lag_messages"] == 3

    streams = json.loads(command("report", "--format", "json")[1])["streams"]
    assert {f"{row['cluster']}/{row['stream']}": row["replication"] for row in streams} == {
        "city/ORDERS": None,
        "city/RETURNS": "copied by CENTRE",
        "hub/ALL": "sources LOCAL, city/ORDERS",
        "hub/LOCAL": "read by feed CENTRE",
        "hub/ORDERS": "mirror of city/ORDERS",
    }
    code, out, err = command("report", "ORDERS", "--format", "json")
    detailed = json.loads(out)
    assert (code, err) == (0, "")
    assert {each["cluster"]: each["state"]["messages"] for each in detailed["streams"]} == {"city": 20, "hub": 20}
    assert {(link["kind"], link["stream"]) for link in detailed["links"]} == {("mirror", "ORDERS"), ("source", "ALL")}
    assert [
        copy["target_stream"] for copy in json.loads(command("report", "RETURNS", "--format", "json")[1])["copies"]
    ] == ["COPIES"]
    shown = command("report", "ORDERS", "--cluster", "city")[1]
    for part in ("Stream ORDERS on city", "orders.>", "num_replicas", "Links"):
        assert part in shown
    assert "Stream ORDERS on hub" not in shown
    assert "mirror of city/ORDERS" in command("report", "ORDERS", "--cluster", "hub")[1]
    code, _, err = command("report", "ORDER")
    assert (code, err) == (2, "error: stream ORDER is on none of the clusters city, hub; did you mean 'ORDERS'?\n")

    pair.cut()
    publish(pair.city, "orders.a", 2)
    publish(pair.city, "orders.b", 3)
    wait_until(lambda: lags() == [(5, True), (2, True), (0, False)], "the cut link to be dead")
    mirror = links_of(command)["ORDERS", "mirror", "ORDERS"]
    assert mirror["active_seconds"] > 10
    wait_until(lambda: links_of(command)["ORDERS", "mirror", "ORDERS"]["lag_seconds"] > 5, "the lag to grow")
    # The server reports no lag for this link.
    assert ask(pair.hub, "$JS.API.STREAM.INFO.ORDERS")["mirror"]["lag"] == 0
    graph = tmp_path / "graph.dot"
    command("report", "--dot", str(graph))
    assert graph.read_text().count('color="red"') == 2
    for label in ("city\\nORDERS", "hub\\nORDERS"):
        assert f'[label="{label}"]' in graph.read_text()


def test_unreachable_cluster_is_a_row_with_unknown_lags(
    nats_server: NatsServer, configure: Configure, command: Command, unique: Callable[[str], str]
) -> None:
    stream = unique("S")
    make(nats_server, stream, mirror={"name": "GONE", "external": {"api": "$JS.nowhere.API", "deliver": ""}})
    # The servers respond, but no JetStream of that domain does.
    cut = {"url": nats_server.url, "domain": "nowhere"}
    clusters = {"here": {"url": nats_server.url}, "gone": {"url": "127.0.0.1:1"}, "cut": cut}
    configure(topology={"clusters": clusters, "streams": [{"cluster": "cut", "stream": "S", "subjects": ["s"]}]})
    code, out, err = command("report", "--format", "json", "--sort", "messages")
    assert code == 1
    assert "cluster gone: " in err
    report = json.loads(out)
    (row,) = [row for row in report["streams"] if row["cluster"] == "cut"]
    assert "no responder" in row["error"]
    (unreachable,) = [row for row in report["streams"] if row["cluster"] == "gone"]
    assert unreachable["stream"] is None
    assert "Connection refused" in unreachable["error"]
    (link,) = [row for row in report["links"] if row["stream"] == stream]
    assert (link["active_seconds"], link["lag_messages"], link["dead"]) == (None, None, True)
    code, out, err = command("report")
    assert code == 1
    assert "never" in out
    assert "unknown" in out
    for options, message in (
        (("--cluster", "x"), "--cluster x is unknown"),
        (("--sort", "x"), "--sort x is not a column"),
    ):
        code, out, err = command("report", *options)
        assert (code, out) == (2, "")
        assert message in err


def test_source_lag_is_measured_without_reported_sequences(
    tmp_path: Path, configure: Configure, command: Command
) -> None:
    with NatsServer(tmp_path / "old", "old", binary=server_binary("2.11")) as old:
        for name in ("A", "B", "IDLE"):
            make(old, name, subjects=[f"{name}.>"])
        sources = [{"name": "A"}, {"name": "B", "filter_subject": "B.x"}, {"name": "B", "filter_subject": "B.y"}]
        make(old, "ALL", sources=[*sources, {"name": "IDLE"}])
        for subject, count in (("A.1", 4), ("B.x", 3), ("B.z", 5)):
            publish(old, subject, count)
        configure(topology={"clusters": {"old": {"url": old.url}}})

        def lags() -> list[Any]:
            rows = json.loads(command("report", "--format", "json")[1])["links"]
            return sorted((row["origin_stream"], row["filter"] or "", row["lag_messages"]) for row in rows)

        caught_up = [("A", "", 0), ("B", "B.x", 0), ("B", "B.y", 0), ("IDLE", "", 0)]
        wait_until(lambda: lags() == caught_up, "all sources to catch up")
