"""The platform as a guest of a Dagster deployment that somebody else owns."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster_duckdb import DuckDBResource

from sr_assets import SrAssetsComponent, build_definitions
from sr_assets.adapters.run_failures import read_run_failures
from sr_assets.adapters.times import utc_now
from sr_assets.automation.failures import record_failures_since
from sr_assets.automation.jobs import JOB_TAG
from sr_assets.domain.errors import ConfigurationError
from sr_assets.resources import DataSources
from sr_assets.settings import load_settings
from sr_assets_tests.rig import SITE, Rig, Sent

EXAMPLE = Path(__file__).parents[1] / "examples" / "component"
TRACKED = """
name: EAST
streams:
  - {name: london, stream: NODES, source_url: a:1, target_url: b:1, inspect_field: sender, inspect_duration: 1h,
     lake: {path: /lake}}
  - {name: paris, stream: NODES, source_url: c:1, target_url: b:1, target_stream: PARIS}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "replication.yaml"
    path.write_text(f"state_store: {tmp_path / 'home'}\n{TRACKED}")
    return path


def names(definitions: dg.Definitions) -> dict[str, set[str]]:
    """Return the names of everything that a deployment keeps apart by name."""
    repository = definitions.get_repository_def()
    jobs = [repository.get_job(job) for job in repository.job_names if not job.startswith("__")]
    ops = {node.name for job in jobs for node in job.all_node_defs}
    return {
        "jobs": {job.name for job in jobs},
        "ops": ops | {node.name for node in definitions.resolve_implicit_global_asset_job_def().all_node_defs},
        "sensors": {sensor.name for sensor in repository.sensor_defs},
        "schedules": {schedule.name for schedule in repository.schedule_defs},
        "keys": {"/".join(key.path) for key in definitions.resolve_asset_graph().get_all_asset_keys()},
        "groups": {str(spec.group_name) for spec in definitions.resolve_all_asset_specs()},
    }


def statuses(definitions: dg.Definitions) -> set[str]:
    repository = definitions.get_repository_def()
    sensors = {sensor.default_status.value for sensor in repository.sensor_defs}
    return sensors | {schedule.default_status.value for schedule in repository.schedule_defs}


def test_guest_runs_nothing_that_was_not_switched_on(file: Path) -> None:
    definitions = build_definitions(file)
    assert statuses(definitions) == {"STOPPED"}
    assert definitions.executor is None
    assert statuses(build_definitions(file, sensors="running", schedules="running")) == {"RUNNING", "STOPPED"}
    (nightly,) = [
        schedule
        for schedule in build_definitions(file, schedules="running").get_repository_def().schedule_defs
        if schedule.default_status is dg.DefaultScheduleStatus.STOPPED
    ]
    assert nightly.name == "nightly_retention"
    file.write_text(file.read_text() + "dagster: {sensors: running, schedules: running}\nrun_retention: true\n")
    assert statuses(build_definitions(file)) == {"RUNNING"}


def test_guest_leaves_out_what_its_host_does_not_want(file: Path) -> None:
    definitions = build_definitions(file, sensors=False, schedules=False, retention=False, failure_sensor="none")
    left = names(definitions)
    assert (left["sensors"], left["schedules"]) == (set(), set())
    assert "retention" not in left["jobs"]
    assert "run_failures" in names(build_definitions(file, sensors=False))["sensors"]


def test_all_names_of_a_guest_carry_its_prefix(file: Path) -> None:
    definitions = build_definitions(file, key_prefix=["choria", "east"], group_prefix="choria_")
    plain, prefixed = names(build_definitions(file)), names(definitions)
    for kind in ("jobs", "ops", "sensors", "schedules"):
        # Dagster names the op of a single asset after its key: `choria__east__fleet__replay`.
        assert all(name.replace("__", "_").startswith("choria_east_") for name in prefixed[kind]), kind
        assert len(prefixed[kind]) == len(plain[kind])
    assert prefixed["keys"] == {f"choria/east/{key}" for key in plain["keys"]}
    assert prefixed["groups"] == {f"choria_{group}" for group in plain["groups"]}
    file.write_text(file.read_text() + "dagster: {key_prefix: [choria, east], group_prefix: choria_}\n")
    assert names(build_definitions(file)) == prefixed


def test_guest_brings_its_own_resources_and_the_given_ones(file: Path) -> None:
    data = DataSources(settings=load_settings(file))
    internal = {f"sr_assets_choria_{name}" for name in ("platform", "spark", "fleet_tables_io_manager")}
    own = {*internal, "choria_fleet_tables"}
    assert set(build_definitions(file, key_prefix="choria").resources or ()) == own
    given = build_definitions(file, key_prefix="choria", resources={"data": data, "number": 1}).resources or {}
    assert given["data"] is data
    assert set(given) == {*own, "data", "number"}


def test_guest_meets_no_name_of_its_host(file: Path) -> None:
    @dg.asset
    def theirs() -> None: ...

    host = dg.Definitions(
        assets=[theirs],
        jobs=[dg.define_asset_job("nightly", [theirs])],
        resources={"spark": object(), "data": object(), "platform": object(), "duckdb": object()},
        executor=dg.multiprocess_executor,
    )
    first = build_definitions(file, sites=["london"], key_prefix="one")
    second = build_definitions(file, sites=["paris"], key_prefix="two")
    merged = dg.Definitions.merge(host, build_definitions(file), first, second)
    dg.Definitions.validate_loadable(merged)
    assert merged.executor is dg.multiprocess_executor
    keys = names(merged)["keys"]
    assert {"theirs", "london/NODES/replica", "one/london/NODES/replica", "two/paris/NODES/replica"} < keys
    assert not {key for key in keys if key.startswith(("one/paris", "two/london"))}


def test_owners_kinds_and_documents_are_those_of_the_configuration(file: Path) -> None:
    text = file.read_text()
    specs = list(build_definitions(file).resolve_all_asset_specs())
    assert {tuple(spec.owners) for spec in specs} == {("team:fleet-platform",)}
    assert not [spec.key for spec in specs if "](" in (spec.description or "")]
    file.write_text(text + "dagster: {owners: [a@b.org], kinds: choria, documents: 'https://docs.example.net/sr/'}\n")
    specs = list(build_definitions(file).resolve_all_asset_specs())
    assert {tuple(spec.owners) for spec in specs} == {("a@b.org",)}
    assert all("choria" in spec.kinds for spec in specs)
    links = {link for spec in specs for link in re.findall(r"\]\((.*?)\)", spec.description or "")}
    assert all(link.startswith("https://docs.example.net/sr/") for link in links)
    assert links
    file.write_text(text + "dagster: {kinds: [a, b, c, d, e, f, g]}\n")
    with pytest.raises(ConfigurationError, match=r"kinds: at most 6, because an asset has at most ten with its own$"):
        build_definitions(file)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    (
        ({"sites": ["londn"]}, "site 'londn' is not configured; did you mean 'london'?"),
        ({"key_prefix": ["a-b"]}, "key_prefix: 'a-b' cannot be in the names of Dagster's jobs"),
        ({"sensors": "sometimes"}, "sensors: "),
        ({"failure_sensor": "all"}, "failure_sensor: 'all' is unknown; use own or none"),
        ({"resources": {"spark": "local[2]"}}, "the resource spark is a str; use a PySparkResource"),
        ({"resources": {"fleet_tables": 3}}, "the resource fleet_tables is a int; use a DuckDBResource"),
    ),
)
def test_bad_argument_is_one_line(file: Path, arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        build_definitions(file, **arguments)
    (line,) = str(refused.value).splitlines()
    assert line.startswith("build_definitions: ")
    assert reason in line


@pytest.mark.nightly
@pytest.mark.process
def test_run_of_a_guest_is_recorded_below_its_prefix(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, inspect_field="sender", inspect_duration="1h")
    rig.publish(stream, [Sent(b'{"sender": "n%d"}' % n) for n in range(2)])
    rig.settings()

    @dg.asset(deps=[dg.AssetKey(["fleet_of", "fleet", "last_seen_nodes"])])
    def report(fleet_of_fleet_tables: DuckDBResource) -> int:
        with fleet_of_fleet_tables.get_connection() as connection:
            return len(connection.execute("FROM last_seen_nodes").fetchall())

    guest = build_definitions(rig.home / "replication.yaml", key_prefix="fleet_of", sensors="running")
    merged = dg.Definitions.merge(dg.Definitions(assets=[report]), guest)
    with dg.DagsterInstance.ephemeral() as instance:
        sensor = merged.resolve_sensor_def(f"fleet_of_{SITE}_lag")
        with dg.build_sensor_context(instance=instance, definitions=merged) as context:
            (request,) = sensor.evaluate_tick(context).run_requests or ()
        job = merged.resolve_job_def(f"fleet_of_{SITE}_replication")
        assert job.execute_in_process(instance=instance, tags=dict(request.tags)).success
        recorded = {key.to_user_string() for key in instance.get_asset_keys()}
        assert {f"fleet_of/{SITE}/{stream}/{noun}" for noun in ("replica", "node_state")} < recorded
        assert "fleet_of/fleet/last_seen_nodes" in recorded
        assert all(key.startswith("fleet_of/") for key in recorded)
        result = merged.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=instance, asset_selection=[dg.AssetKey("report")]
        )
        assert result.output_for_node("report") == 2


@pytest.mark.process
def test_guest_reports_only_failures_of_its_own_runs(file: Path) -> None:
    @dg.op
    def fails() -> None:
        raise RuntimeError("no")

    def fail(name: str, tag: str) -> None:
        job = dg.GraphDefinition(name=name, node_defs=[fails]).to_job()
        job.execute_in_process(instance=instance, tags={JOB_TAG: tag}, raise_on_error=False)

    deployment = load_settings(file).dagster.changed(key_prefix=("ours",))
    settings = load_settings(file).changed(dagster=deployment)
    settings.home.mkdir()
    with dg.DagsterInstance.ephemeral() as instance:
        since = utc_now()
        fail("theirs_availability", "availability")
        record_failures_since(settings, instance, since)
        assert read_run_failures(settings.home) == {}
        fail("ours_availability", "availability")
        record_failures_since(settings, instance, since)
        assert read_run_failures(settings.home).keys() == {"ours_availability"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the example project, whose package this process can import."""
    folder = tmp_path / "project"
    shutil.copytree(EXAMPLE, folder)
    return folder


def dg_command(project: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).with_name("dg")), *arguments]
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(project), "PYTHONPATH": str(project / "src")}
    environ |= {
        "VIRTUAL_ENV": sys.prefix,
        "DAGSTER_DISABLE_TELEMETRY": "1",
        "DG_CLI_CONFIG": str(project / "none.toml"),
    }
    return subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.process
def test_dg_loads_the_example_project(project: Path) -> None:
    checked = dg_command(project, "check", "defs", "--use-active-venv")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    listed = dg_command(project, "list", "defs", "--json")
    assert listed.returncode == 0, listed.stderr
    for key in ("silent_nodes", "choria/london/NODES/replica", "choria/fleet/last_seen_nodes"):
        assert f'"{key}"' in listed.stdout


@pytest.mark.nightly
@pytest.mark.process
def test_dg_scaffolds_a_component_with_a_configuration(project: Path) -> None:
    made = dg_command(project, "scaffold", "defs", "sr_assets.SrAssetsComponent", "paris")
    assert made.returncode == 0, made.stdout + made.stderr
    folder = project / "src" / "my_project" / "defs" / "paris"
    assert "type: sr_assets.SrAssetsComponent" in (folder / "defs.yaml").read_text()
    assert load_settings(folder / "replication.yaml", {}).streams
    # Two components without a prefix would share names: here only one has none.
    checked = dg_command(project, "check", "defs", "--use-active-venv")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.process
@pytest.mark.parametrize(
    ("attributes", "reason"),
    (
        ("config: ../fleet/replication.yaml\n  key_prefix: [other]", "defines site london too"),
        pytest.param(
            "config: mine.yaml\n  key_prefix: [choria]",
            "has choria too; give each component its own key_prefix",
            marks=pytest.mark.nightly,
        ),
        pytest.param("config: none.yaml\n  key_prefix: [other]", "none.yaml", marks=pytest.mark.nightly),
    ),
)
def test_components_that_overlap_are_refused(project: Path, attributes: str, reason: str) -> None:
    folder = project / "src" / "my_project" / "defs" / "second"
    folder.mkdir()
    text = (folder.parent / "fleet" / "replication.yaml").read_text()
    (folder / "mine.yaml").write_text(text.replace("london", "paris"))
    (folder / "defs.yaml").write_text(f"type: sr_assets.SrAssetsComponent\nattributes:\n  {attributes}\n")
    checked = dg_command(project, "check", "defs", "--use-active-venv")
    assert checked.returncode != 0
    assert [line for line in (checked.stdout + checked.stderr).splitlines() if reason in line]


def test_component_has_the_attributes_of_the_factory() -> None:
    attributes = set(SrAssetsComponent.model_fields)
    assert attributes == {name for name in build_definitions.__annotations__ if name not in ("return", "resources")}
