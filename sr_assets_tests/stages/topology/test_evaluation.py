"""Native streams in Dagster: lineage, the job's changes and records, and the sensor's results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.definitions import build
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.operate.metrics import Exposition
from sr_assets.settings import Settings, load_settings
from sr_assets_tests.linked import ask, make, publish
from sr_assets_tests.rig import wait_until
from sr_assets_tests.stages.topology.conftest import Configure

pytestmark = pytest.mark.process


def key(*parts: str) -> dg.AssetKey:
    return dg.AssetKey(parts)


def test_native_streams_share_one_lineage_with_replication_entries(configure: Configure) -> None:
    hub = {"url": "hub:4222", "domain": "hub"}
    streams = [
        {"cluster": "hub", "stream": "M", "mirror": {"stream": "CITY", "cluster": "city"}},
        {"cluster": "hub", "stream": "ALL", "sources": [{"stream": "COPIES"}, {"stream": "OTHER"}]},
    ]
    entry = {"name": "LONDON", "stream": "M", "source_url": "hub:4222", "target_url": "hub:4222"}
    file = configure(
        topology={"clusters": {"hub": hub, "city": {"url": "city:4222"}}, "streams": streams},
        streams=[{**entry, "target_stream": "COPIES", "target_subject_prefix": "c"}],
    )
    graph = build(load_settings(file, {})).resolve_asset_graph()
    parents = {
        "/".join(asset_key.path): {"/".join(parent.path) for parent in graph.get(asset_key).parent_keys}
        for asset_key in graph.get_all_asset_keys()
    }
    assert parents["topology/hub/M"] == {"topology/city/CITY"}
    assert parents["LONDON/M/source"] == {"topology/hub/M"}
    assert parents["topology/hub/ALL"] == {"LONDON/M/replica", "topology/hub/OTHER"}
    assert {"topology/hub/M", "topology/hub/ALL"} <= parents["fleet/topology_links"]
    assert {check.name for check in graph.get_check_keys_for_assets({key("topology", "hub", "M")})} == {
        "link_active",
        "link_caught_up",
        "link_error",
        "no_drift",
    }


class TopologyInstance:
    """A configuration and its Dagster instance: run the job, evaluate the sensor, read the tables."""

    def __init__(self, file: Path, instance: dg.DagsterInstance) -> None:
        self.settings: Settings = load_settings(file, {})
        self._instance = instance
        self._cursor: str | None = None

    def run(self) -> dg.ExecuteInProcessResult:
        """Run the job in this process."""
        return build(self.settings).resolve_job_def("topology").execute_in_process(instance=self._instance)

    def tick(self) -> dg.SensorResult:
        """Evaluate the sensor once."""
        definitions = build(self.settings)
        sensor = definitions.resolve_sensor_def("topology_watch")
        with dg.build_sensor_context(instance=self._instance, cursor=self._cursor, definitions=definitions) as context:
            result = sensor(context)
        assert isinstance(result, dg.SensorResult)
        self._cursor = result.cursor
        return result

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of a published table."""
        with open_fleet(self.settings.home) as opened:
            result = opened.execute(f"SELECT * FROM {table} ORDER BY ALL")
            names = [column[0] for column in result.description or ()]
            return [dict(zip(names, row, strict=True)) for row in result.fetchall()]


def failed_checks(result: dg.SensorResult) -> set[tuple[str, str]]:
    """Return stream and check name of each failed check of a tick."""
    events = [event for event in result.asset_events if isinstance(event, dg.AssetCheckEvaluation)]
    return {(event.asset_key.path[-1], event.check_name) for event in events if not event.passed}


def test_job_creates_missing_streams_and_tick_records_changes(
    nats_server: NatsServer, configure: Configure, unique: Callable[[str], str]
) -> None:
    origin, mirror, lost = unique("O"), unique("M"), unique("L")
    make(nats_server, origin, subjects=[f"{origin}.>"])
    publish(nats_server, f"{origin}.a", 3)
    cluster = {"here": {"url": nats_server.url}}
    nowhere = {"stream": "GONE", "api_prefix": "$JS.nowhere.API"}
    streams = [{"stream": mirror, "mirror": {"stream": origin}}, {"stream": lost, "sources": [nowhere]}]
    file = configure(topology={"manage": "create", "clusters": cluster, "streams": streams}, sensor={"interval": "1s"})
    with dg.DagsterInstance.ephemeral() as instance:
        watched = TopologyInstance(file, instance)
        first = watched.tick()
        assert first.run_requests is not None
        assert first.run_requests[0].tags["sr_assets/reason"] == "first run"
        assert {(mirror, "no_drift"), (lost, "link_active")} <= failed_checks(first)
        assert {row["key"] for row in watched.rows("topology_drift")} == {"stream"}

        result = watched.run()
        assert result.success
        materialized = {
            event.asset_key.path[-1] for event in result.get_asset_materialization_events() if event.asset_key
        }
        assert materialized == {mirror, lost}
        (event,) = [
            e for e in result.asset_materializations_for_node("native_streams") if e.asset_key.path[-1] == mirror
        ]
        assert str(event.metadata["picture"].value).startswith("![streams](data:image/png;base64,")
        assert {row["stream"] for row in watched.rows("topology_streams")} >= {origin, mirror, lost}

        def caught_up() -> bool:
            result = watched.tick()
            assert not result.run_requests
            links = {row["stream"]: row["lag_messages"] for row in watched.rows("topology_links")}
            return links[mirror] == 0 and links[lost] is None and not watched.rows("topology_drift")

        wait_until(caught_up, "a tick that sees the mirror active")
        exposition = Exposition(watched.settings)
        exposition.renew()
        labels = f'{{cluster="here",stream="{mirror}",kind="mirror",origin="here/{origin}"}}'
        assert f"sr_assets_link_lag_messages{labels} 0" in exposition.text()
        assert f"sr_assets_link_active_seconds{labels}" in exposition.text()
        # Recorded results are not repeated; the lost source may change at any time, so check only the mirror.
        assert mirror not in {event.asset_key.path[-1] for event in watched.tick().asset_events}

        config = ask(nats_server, f"$JS.API.STREAM.INFO.{mirror}")["config"]
        ask(nats_server, f"$JS.API.STREAM.UPDATE.{mirror}", {**config, "max_msgs": 9})
        edited = watched.tick()
        assert {check for stream, check in failed_checks(edited) if stream == mirror} == {"no_drift"}
        # `manage: create` does not undo manual edits.
        assert not edited.run_requests
        drift = [(row["stream"], row["key"], row["remedy"]) for row in watched.rows("topology_drift")]
        assert drift == [(mirror, "max_msgs", "updatable")]
        assert json.loads(edited.cursor or "{}")["problems"][f"here/{mirror}"] == ["no_drift"]
