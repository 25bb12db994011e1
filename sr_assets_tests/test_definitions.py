"""The platform as Dagster knows it: which assets, checks, jobs and sensors a configuration gives."""

import os
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from sr_assets.definitions import build
from sr_assets.settings import load_settings

TRACKED = """
name: US-EAST
streams:
  - {name: london.city, stream: NODES, source_url: a:1, target_url: b:1, inspect_field: sender, inspect_duration: 1h}
  - {name: paris, stream: NODES, source_url: c:1, target_url: b:1, target_stream: PARIS}
"""


@pytest.fixture
def definitions(tmp_path: Path) -> dg.Definitions:
    file = tmp_path / "replication.yaml"
    file.write_text(TRACKED)
    return build(load_settings(file, {"SR_ASSETS_HOME": str(tmp_path)}))


def test_a_tracked_stream_has_every_stage_and_a_plain_one_its_replica_alone(definitions: dg.Definitions) -> None:
    graph = definitions.resolve_asset_graph()
    nouns = {key.path[-1] for key in graph.get_all_asset_keys() if key.path[:2] == ["london_city", "NODES"]}
    assert nouns == {"source", "replica", "node_snapshots", "node_state", "node_advisories"}
    assert {key.path[-1] for key in graph.get_all_asset_keys() if key.path[0] == "paris"} == {"source", "replica"}


def test_watching_depends_on_the_source_alone_and_copying_on_what_was_decided(definitions: dg.Definitions) -> None:
    graph = definitions.resolve_asset_graph()

    def parents(*key: str) -> set[str]:
        return {"/".join(parent.path) for parent in graph.get(dg.AssetKey(key)).parent_keys}

    tracked = "london_city/NODES"
    assert parents("london_city", "NODES", "node_state") == {f"{tracked}/source"}
    assert parents("london_city", "NODES", "replica") == {f"{tracked}/source", f"{tracked}/node_state"}
    assert parents("london_city", "NODES", "node_snapshots") == {f"{tracked}/replica"}
    assert parents("london_city", "NODES", "node_advisories") == {f"{tracked}/node_state"}
    assert parents("paris", "NODES", "replica") == {"paris/NODES/source"}


def test_overdue_is_what_watches_and_not_what_copies(definitions: dg.Definitions) -> None:
    specs = {spec.key: spec for spec in definitions.resolve_all_asset_specs()}
    timed = {key.to_user_string() for key, spec in specs.items() if spec.freshness_policy is not None}
    assert timed == {"london_city/NODES/node_state"}


def test_every_published_table_is_an_asset_of_its_own(definitions: dg.Definitions) -> None:
    graph = definitions.resolve_asset_graph()
    tables = {key.path[1] for key in graph.get_all_asset_keys() if key.path[0] == "fleet"}
    assert tables == {
        "last_seen_nodes",
        "retired_nodes",
        "node_availability",
        "node_advisories",
        "node_snapshots",
        "replication",
        "gaps",
        "parked_messages",
        "site_summary",
        "snapshot_info",
    }


def test_sources_are_external_and_everything_else_is_ours_and_says_what_it_is(definitions: dg.Definitions) -> None:
    graph = definitions.resolve_asset_graph()
    for key in graph.get_all_asset_keys():
        node = graph.get(key)
        assert node.is_executable == (key.path[-1] != "source"), key
        assert node.description, key
        assert node.owners, key
        assert node.kinds, key
        assert node.group_name == key.path[0], key


def test_checks_are_those_of_the_contract(definitions: dg.Definitions) -> None:
    found = {(key.asset_key.path[0], key.name) for key in definitions.resolve_asset_graph().asset_check_keys}
    replica = {"no_gap", "in_order", "no_loss", "progressing"}
    assert found == {("london_city", name) for name in (*replica, "senders_found", "advisories_published")} | {
        ("paris", name) for name in replica
    }


def test_every_site_has_one_sensor_and_one_job_over_its_assets_and_the_tables(definitions: dg.Definitions) -> None:
    repository = definitions.get_repository_def()
    assert {sensor.name for sensor in repository.sensor_defs} == {"london_city_lag", "paris_lag"}
    assert all(sensor.default_status is dg.DefaultSensorStatus.RUNNING for sensor in repository.sensor_defs)
    keys = definitions.resolve_job_def("london_city_replication").asset_layer.executable_asset_keys
    assert {key.path[0] for key in keys} == {"london_city", "fleet"}


def test_a_feed_is_an_asset_of_its_site_between_what_fills_its_stream_and_the_global_tables(tmp_path: Path) -> None:
    file = tmp_path / "replication.yaml"
    feeds = "feeds:\n  - {name: centre, stream: PARIS, url: b:1}\n  - {name: centre, stream: OTHER, url: b:1}\n"
    file.write_text(TRACKED + feeds)
    definitions = build(load_settings(file, {"SR_ASSETS_HOME": str(tmp_path)}))
    graph = definitions.resolve_asset_graph()

    def parents(*key: str) -> set[str]:
        return {"/".join(parent.path) for parent in graph.get(dg.AssetKey(key)).parent_keys}

    assert parents("centre", "PARIS", "advisory_feed") == {"paris/NODES/replica"}
    assert parents("centre", "OTHER", "advisory_feed") == {"centre/OTHER/source"}
    for table in ("global_availability", "global_advisories", "global_summary", "global_rejects"):
        assert parents("fleet", table) == {"centre/PARIS/advisory_feed", "centre/OTHER/advisory_feed"}
    checks = {key.name for key in graph.asset_check_keys if key.asset_key.path[:2] == ["centre", "PARIS"]}
    assert checks == {"no_gap", "advisories_understood", "sites_watched"}
    keys = definitions.resolve_job_def("centre_replication").asset_layer.executable_asset_keys
    assert {key.path[0] for key in keys} == {"centre", "fleet"}
    assert "centre_lag" in {sensor.name for sensor in definitions.get_repository_def().sensor_defs}


@pytest.mark.process
def test_the_configured_file_is_what_dagster_loads(tmp_path: Path) -> None:
    file = tmp_path / "replication.yaml"
    file.write_text(TRACKED)
    script = "import sr_assets.definitions as d, dagster; print(type(d.defs).__name__)"
    environment = {**os.environ, "SR_ASSETS_CONFIG": str(file), "SR_ASSETS_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "dagster", "definitions", "validate", "-m", "sr_assets.definitions"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + script
