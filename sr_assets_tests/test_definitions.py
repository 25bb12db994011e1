"""The definitions of a configuration: assets, checks, jobs, sensors and schedules."""

import multiprocessing
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.remote_representation.external_data import RepositorySnap
from dagster_shared.serdes import serialize_value

from sr_assets.adapters.published.catalog import COLUMN_TYPES, ROWS
from sr_assets.definitions import build, defs
from sr_assets.settings import FeedSettings, Settings, load_settings
from sr_assets_tests.rig import PATIENCE_SECONDS

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


def parents(definitions: dg.Definitions, *key: str) -> set[str]:
    """Return the assets that an asset depends on, as `name/stream/noun`."""
    return {"/".join(parent.path) for parent in definitions.resolve_asset_graph().get(dg.AssetKey(key)).parent_keys}


def test_only_a_tracked_stream_has_an_asset_per_stage(definitions: dg.Definitions) -> None:
    graph = definitions.resolve_asset_graph()
    nouns = {key.path[-1] for key in graph.get_all_asset_keys() if key.path[:2] == ["london_city", "NODES"]}
    assert nouns == {"source", "replica", "node_snapshots", "node_state", "node_advisories"}
    assert {key.path[-1] for key in graph.get_all_asset_keys() if key.path[0] == "paris"} == {"source", "replica"}


def test_node_state_depends_on_source_and_replica_on_node_state(definitions: dg.Definitions) -> None:
    tracked = "london_city/NODES"
    assert parents(definitions, "london_city", "NODES", "node_state") == {f"{tracked}/source"}
    assert parents(definitions, "london_city", "NODES", "replica") == {f"{tracked}/source", f"{tracked}/node_state"}
    assert parents(definitions, "london_city", "NODES", "node_snapshots") == {f"{tracked}/replica"}
    assert parents(definitions, "london_city", "NODES", "node_advisories") == {f"{tracked}/node_state"}
    assert parents(definitions, "paris", "NODES", "replica") == {"paris/NODES/source"}


def test_what_a_tracked_stream_makes_has_a_freshness_policy(definitions: dg.Definitions) -> None:
    specs = {spec.key: spec for spec in definitions.resolve_all_asset_specs()}
    timed = {key.to_user_string() for key, spec in specs.items() if spec.freshness_policy is not None}
    tables = {key for key in timed if key.startswith("fleet/")}
    assert timed - tables == {"london_city/NODES/node_state", "london_city/NODES/replica"}
    assert tables >= {"fleet/last_seen_nodes", "fleet/retired_nodes", "fleet/availability_daily"}
    # warn_duration is half of the interval of an hour; a sensor's interval and the budget of a run come on top.
    policy = specs[dg.AssetKey(["london_city", "NODES", "node_state"])].freshness_policy
    assert policy == dg.FreshnessPolicy.time_window(
        warn_window=timedelta(minutes=30 + 5, seconds=30), fail_window=timedelta(minutes=60 + 5, seconds=30)
    )


def test_each_node_of_the_graph_shows_its_stream(definitions: dg.Definitions) -> None:
    specs = [spec for spec in definitions.resolve_all_asset_specs() if spec.key.path[0] != "fleet"]
    assert len(specs) == 7
    for spec in specs:
        assert spec.key.path[-2] in spec.kinds, spec.key
        assert str(spec.description).startswith(spec.key.path[-2]), spec.key


def test_assets_refer_to_the_configuration_and_lineage_to_real_columns(definitions: dg.Definitions) -> None:
    specs = {spec.key: spec for spec in definitions.resolve_all_asset_specs()}
    files = {
        str(reference.file_path)
        for spec in specs.values()
        for reference in spec.metadata["dagster/code_references"].code_references
    }
    assert [Path(file).name for file in files] == ["replication.yaml"]
    lineages = {key: spec.metadata.get("dagster/column_lineage") for key, spec in specs.items()}
    traced = {key: lineage for key, lineage in lineages.items() if lineage is not None}
    assert {key.path[-1] for key in traced} == {"availability_daily", "inventory_daily"}
    for key, lineage in traced.items():
        assert lineage.deps_by_column.keys() <= COLUMN_TYPES[key.path[-1]].keys()
        for dep in (dep for deps in lineage.deps_by_column.values() for dep in deps):
            assert dep.asset_key in {each.asset_key for each in specs[key].deps}
            assert dep.column_name in COLUMN_TYPES[dep.asset_key.path[-1]]


def test_every_published_table_is_an_asset(definitions: dg.Definitions) -> None:
    graph = definitions.resolve_asset_graph()
    tables = {key.path[1] for key in graph.get_all_asset_keys() if key.path[0] == "fleet"}
    global_tables = {"global_availability", "global_advisories", "global_summary", "global_rejects"}
    topology_tables = {"topology_streams", "topology_links", "topology_drift"}
    no_assets = {"blind_spans", "node_snapshot_history", "v_nodes_at_several_sites"}
    assert tables == ROWS.keys() - global_tables - topology_tables - no_assets | {"replay"}


def test_every_asset_is_described_and_only_sources_are_external(definitions: dg.Definitions) -> None:
    graph = definitions.resolve_asset_graph()
    for key in graph.get_all_asset_keys():
        node = graph.get(key)
        assert node.is_executable == (key.path[-1] != "source"), key
        assert node.description, key
        assert node.owners, key
        assert node.kinds, key
        assert node.group_name == key.path[0], key


def test_definitions_have_the_checks_of_the_contract(definitions: dg.Definitions) -> None:
    checks = {(key.asset_key.path[0], key.name) for key in definitions.resolve_asset_graph().asset_check_keys}
    replica = {"no_gap", "in_order", "no_loss", "none_parked", "progressing", "path_alive"}
    assert checks == {("london_city", name) for name in (*replica, "senders_found", "advisories_published")} | {
        ("paris", name) for name in replica
    } | {("fleet", "seconds_add_up"), ("fleet", "values_add_up"), ("fleet", "no_node_missing")}


def test_every_site_has_a_sensor_and_a_job_with_its_assets(definitions: dg.Definitions) -> None:
    repository = definitions.get_repository_def()
    assert {sensor.name for sensor in repository.sensor_defs} == {"london_city_lag", "paris_lag", "run_failures"}
    assert all(sensor.default_status is dg.DefaultSensorStatus.RUNNING for sensor in repository.sensor_defs)
    keys = definitions.resolve_job_def("london_city_replication").asset_layer.executable_asset_keys
    assert {key.path[0] for key in keys} == {"london_city"}


def test_feed_is_downstream_of_its_stream_and_upstream_of_global_tables(tmp_path: Path) -> None:
    file = tmp_path / "replication.yaml"
    feeds = "feeds:\n  - {name: centre, stream: PARIS, url: b:1}\n  - {name: centre, stream: OTHER, url: b:1}\n"
    file.write_text(TRACKED + feeds)
    definitions = build(load_settings(file, {"SR_ASSETS_HOME": str(tmp_path)}))
    graph = definitions.resolve_asset_graph()
    assert parents(definitions, "centre", "PARIS", "advisory_feed") == {"paris/NODES/replica"}
    assert parents(definitions, "centre", "OTHER", "advisory_feed") == {"centre/OTHER/source"}
    for table in ("global_availability", "global_advisories", "global_summary", "global_rejects"):
        assert parents(definitions, "fleet", table) == {"centre/PARIS/advisory_feed", "centre/OTHER/advisory_feed"}
    checks = {key.name for key in graph.asset_check_keys if key.asset_key.path[:2] == ["centre", "PARIS"]}
    assert checks == {"no_gap", "advisories_understood", "sites_watched"}
    keys = definitions.resolve_job_def("centre_replication").asset_layer.executable_asset_keys
    assert {key.path[0] for key in keys} == {"centre"}
    assert "centre_lag" in {sensor.name for sensor in definitions.get_repository_def().sensor_defs}


@pytest.mark.process
def test_dagster_loads_the_configured_file(tmp_path: Path) -> None:
    file = tmp_path / "replication.yaml"
    file.write_text(TRACKED)
    environment = {**os.environ, "SR_ASSETS_CONFIG": str(file), "SR_ASSETS_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "dagster", "definitions", "validate", "-m", "sr_assets.definitions"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def many(folder: Path, sites: int) -> Settings:
    """Return the settings of many sites with one tracked stream each."""
    stream = "stream: NODES, source_url: a:1, target_url: b:1, inspect_field: sender, inspect_duration: 1h"
    lines = [f"  - {{name: site{number}, {stream}, target_stream: T{number}}}" for number in range(sites)]
    file = folder / "many.yaml"
    file.write_text("\n".join(["name: US-EAST", "streams:", *lines]))
    return load_settings(file, {"SR_ASSETS_HOME": str(folder)})


def snapshots(settings: Settings) -> tuple[int, int]:
    """Return the bytes of the repository's snapshot with its jobs, and of the snapshot of one site's job."""
    repository = build(settings).get_repository_def()
    whole = serialize_value(RepositorySnap.from_def(repository))
    return len(whole), len(serialize_value(repository.get_job("site3_replication").get_job_snapshot()))


@pytest.mark.filterwarnings("ignore:Property `ScheduleDefinition.environment_vars`")  # by Dagster's own snapshot
def test_job_snapshot_does_not_grow_with_the_number_of_sites(tmp_path: Path) -> None:
    (few, job_of_few), (many_, job_of_many) = (snapshots(many(tmp_path, sites)) for sites in (5, 50))
    assert job_of_many == job_of_few < 18_000
    # Per additional site: 24 MB for 600 sites.
    assert (many_ - few) / 45 < 40_000


def test_copied_into_returns_the_streams_that_feed_reads(tmp_path: Path) -> None:
    settings = many(tmp_path, 3)
    feed = FeedSettings.model_validate({"name": "centre", "stream": "T1", "url": settings.streams[0].target.label})
    assert settings.copied_into(feed) == [settings.streams[1]]
    assert settings.copied_into(feed.changed(stream="T9")) == []
    assert settings.copied_into(feed.changed(url=settings.streams[0].source)) == []


def loaded_jobs(queue: "multiprocessing.Queue[list[str]]") -> None:
    """Load the definitions, as a run's process does, and put the names of their jobs into the queue."""
    from sr_assets.definitions import defs

    queue.put(sorted(defs().get_repository_def().job_names))


@pytest.mark.process
def test_only_process_of_site_run_loads_active_sites_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = many(tmp_path, 4)
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    for name, value in (("DAGSTER_HOME", tmp_path), ("SR_ASSETS_CONFIG", tmp_path / "many.yaml")):
        monkeypatch.setenv(name, str(value))
    spawn = multiprocessing.get_context("spawn")

    def loaded() -> list[str]:
        queue: multiprocessing.Queue[list[str]] = spawn.Queue()
        process = spawn.Process(target=loaded_jobs, args=(queue,))
        process.start()
        jobs = queue.get(timeout=PATIENCE_SECONDS)
        process.join()
        return jobs

    all_jobs = sorted(
        ["__ASSET_JOB", "availability", "inventory", "retention", *(f"site{number}_replication" for number in range(4))]
    )
    with dg.DagsterInstance.get() as instance:
        job = build(settings).resolve_job_def("site2_replication")
        instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTING)
        assert loaded() == ["__ASSET_JOB", "site2_replication"]
        assert sorted(defs().get_repository_def().job_names) == all_jobs
        instance.create_run_for_job(build(settings).resolve_job_def("retention"), status=dg.DagsterRunStatus.STARTED)
        assert loaded() == all_jobs
