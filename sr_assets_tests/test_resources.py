"""The resources `platform`, `fleet_tables` and `spark`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import pytest
from dagster_duckdb import DuckDBResource
from dagster_pyspark import PySparkResource
from pyarrow import parquet
from pyspark.errors import PySparkException
from pyspark.sql import functions

from sr_assets.assets.specs import site_job_name
from sr_assets.automation.jobs import FIRST_TAG, LAST_TAG
from sr_assets.definitions import build
from sr_assets.domain.days import date_at
from sr_assets.domain.errors import RunError
from sr_assets.resources import FleetTables, Platform
from sr_assets.settings import Settings, load_settings
from sr_assets_tests.published import publish_nodes
from sr_assets_tests.rig import SITE, Rig, Sent

CONFIGURATION = """
name: US-EAST
streams:
  - {name: london, stream: REG, source_url: "nats://user:secret-word@127.0.0.1:1", target_url: b:1}
spark: {config: {spark.hadoop.password: secret-word}}
"""


def configured(folder: Path, home: Path) -> Settings:
    file = folder / "replication.yaml"
    file.write_text(CONFIGURATION)
    return load_settings(file, {"SR_ASSETS_HOME": str(home)})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return configured(tmp_path, tmp_path / "home")


@pytest.fixture
def fleet_tables(settings: Settings) -> FleetTables:
    publish_nodes(settings.home, sequence=3)
    return FleetTables(database=str(settings.home / "fleet.duckdb"))


def position(connection: duckdb.DuckDBPyConnection) -> Any:
    return connection.execute("SELECT next_sequence FROM replication").fetchall()


def with_user_asset(platform: dg.Definitions, asset: dg.AssetsDefinition) -> dg.JobDefinition:
    """Return the job of a user's asset that is merged into the platform's definitions."""
    user = dg.Definitions(assets=[asset], jobs=[dg.define_asset_job("user", [asset])])
    return dg.Definitions.merge(platform, user).resolve_job_def("user")


def test_fleet_tables_are_read_only(fleet_tables: FleetTables) -> None:
    with fleet_tables.get_connection() as connection:
        assert position(connection) == [(3,)]
        assert connection.execute("SELECT current_setting('TimeZone')").fetchall() == [("UTC",)]
        with pytest.raises(duckdb.InvalidInputException, match="read-only"):
            connection.execute("CREATE TABLE extra (x INTEGER)")


def test_connection_is_closed_after_an_exception(fleet_tables: FleetTables, settings: Settings) -> None:
    with pytest.raises(ZeroDivisionError), fleet_tables.get_connection() as connection:
        raise ZeroDivisionError
    with pytest.raises(duckdb.ConnectionException):
        position(connection)
    publish_nodes(settings.home, sequence=4)
    with fleet_tables.get_connection() as connection:
        assert position(connection) == [(4,)]


def test_connection_config_sets_duckdb_options(fleet_tables: FleetTables) -> None:
    limited = FleetTables(database=fleet_tables.database, connection_config={"threads": 1})
    with limited.get_connection() as connection:
        assert connection.execute("SELECT current_setting('threads')").fetchall() == [(1,)]


def test_fleet_tables_raise_one_line_before_the_first_publication(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match="nothing is published yet"),
        FleetTables(database=str(tmp_path / "fleet.duckdb")).get_connection(),
    ):
        pass


def test_build_replaces_and_adds_resources(tmp_path: Path, settings: Settings) -> None:
    elsewhere = tmp_path / "elsewhere"
    publish_nodes(elsewhere, sequence=5)
    seen = {}

    @dg.asset
    def counted(fleet_tables: DuckDBResource, limit: dg.ResourceParam[int]) -> None:
        with fleet_tables.get_connection() as connection:
            seen["position"] = position(connection)
        seen["limit"] = limit

    definitions = build(settings, {"fleet_tables": FleetTables(database=str(elsewhere / "fleet.duckdb")), "limit": 7})
    with dg.DagsterInstance.ephemeral() as instance:
        assert with_user_asset(definitions, counted).execute_in_process(instance=instance).success
    assert seen == {"position": [(5,)], "limit": 7}


def test_build_replaces_the_platform_resource(tmp_path: Path, settings: Settings) -> None:
    """The step that records the published tables reads their location from the platform."""
    other = configured(tmp_path, tmp_path / "other")
    publish_nodes(other.home)
    job = build(settings, {"platform": Platform(settings=other)}).resolve_implicit_global_asset_job_def()
    with dg.DagsterInstance.ephemeral() as instance:
        result = job.execute_in_process(instance=instance, asset_selection=[dg.AssetKey(["fleet", "replication"])])
    (recorded,) = result.asset_materializations_for_node("fleet_tables")
    assert recorded.metadata["dagster/row_count"].value == 1


def test_resources_expose_no_secret_to_dagster(settings: Settings) -> None:
    resources = build(settings).get_repository_def().get_top_level_resources()
    assert set(resources) == {"platform", "fleet_tables", "fleet_tables_io_manager", "data", "spark"}
    defaults = {
        name: field.default_value_as_json_str
        for name, resource in resources.items()
        if (field := resource.config_field) is not None and field.default_provided
    }
    assert defaults["platform"] == "{}"
    assert str(settings.home) in defaults["fleet_tables"]
    assert "secret-word" not in repr(defaults)


@pytest.mark.process
def test_loading_the_definitions_imports_neither_spark_nor_pandas(settings: Settings, tmp_path: Path) -> None:
    script = (
        "import sys; from sr_assets import definitions as d;"
        " d.build(d.load_settings()).get_repository_def();"
        "print([name for name in ('pyspark', 'dagster_pyspark', 'pandas', 'py4j') if name in sys.modules])"
    )
    environment = {
        **os.environ,
        "SR_ASSETS_CONFIG": str(tmp_path / "replication.yaml"),
        "SR_ASSETS_HOME": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_every_run_has_its_own_spark_session_and_ends_it(tmp_path: Path, engine_home: Path) -> None:
    file = tmp_path / "plain.yaml"
    file.write_text(CONFIGURATION.partition("spark:")[0])
    settings = load_settings(file, {"SR_ASSETS_HOME": str(engine_home)})
    sessions = []

    @dg.asset
    def rows(spark: PySparkResource) -> dg.MaterializeResult[None]:
        session = spark.spark_session
        assert spark.spark_session is session
        sessions.append(session)
        return dg.MaterializeResult(metadata={"rows": session.range(2000).where(functions.col("id") < 1000).count()})

    job = with_user_asset(build(settings), rows)
    with dg.DagsterInstance.ephemeral() as instance:
        for _ in range(2):
            result = job.execute_in_process(instance=instance)
            (recorded,) = result.asset_materializations_for_node("rows")
            assert recorded.metadata["rows"].value == 1000
    first, second = sessions
    assert first.session_id != second.session_id
    for session in sessions:
        with pytest.raises(PySparkException, match="NO_ACTIVE_SESSION"):
            session.range(1).count()


_OWN_RESOURCE = """
import json, sys
from pathlib import Path
import dagster as dg
from dagster_pyspark import PySparkResource
from sr_assets.adapters.spark.config import child_environment
from sr_assets.definitions import build
from sr_assets.settings import load_settings

import os
home = Path(sys.argv[1]).parent
os.environ |= {key: value for key, value in child_environment(home).items() if key.startswith(("JAVA_", "PYSPARK_"))}
options = {"spark.master": "local[2]", "spark.app.name": "theirs", "spark.ui.enabled": "false"}
own = PySparkResource(spark_config=options)
definitions = build(load_settings(Path(sys.argv[1]), {}), {"spark": own})
with dg.DagsterInstance.ephemeral() as instance:
    result = definitions.resolve_job_def(sys.argv[2]).execute_in_process(instance=instance)
    days = [
        definitions.resolve_job_def(job).execute_in_process(instance=instance, tags=json.loads(sys.argv[3]))
        for job in ("availability", "inventory")
    ]
numbers = {
    made.asset_key.path[-1]: {name: made.metadata[name].value for name in ("spark_messages", "local_messages")}
    for made in (event.materialization for event in result.get_asset_materialization_events())
    if "spark_messages" in made.metadata
}
for daily in days:
    for made in (event.materialization for event in daily.get_asset_materialization_events()):
        numbers[made.asset_key.path[-1]] = {name: made.metadata[name].value for name in ("computed_in", "days")}
print(json.dumps(numbers))
"""


@pytest.mark.nightly
@pytest.mark.process
def test_site_and_days_are_work_of_a_users_session(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, inspect_field="sender", inspect_duration="1h")
    rig.spark = {"config": {"spark.master": "local[0]"}}  # no engine of ours could start
    rig.publish(stream, [Sent(b'{"sender": "n%d"}' % (n % 2)) for n in range(6)])
    settings = rig.settings()
    file, job = rig.home / "replication.yaml", site_job_name(settings, SITE)
    day = date_at(rig.info(stream).last_stored_ns or 0)
    tags = json.dumps({FIRST_TAG: f"{day}", LAST_TAG: f"{day}"})
    command = [sys.executable, "-c", _OWN_RESOURCE, str(file), job, tags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "node_state": {"spark_messages": 6, "local_messages": 0},
        "replica": {"spark_messages": 2, "local_messages": 0},
        "availability_daily": {"computed_in": "Spark", "days": 1},
        "inventory_daily": {"computed_in": "Spark", "days": 1},
    }
    for folder in ("availability", "inventory"):
        about = parquet.read_metadata(rig.home / folder / f"{day}.parquet")
        # The executors wrote the file.
        assert (about.num_rows > 0, about.created_by.split()[0]) == (True, "parquet-mr")
    assert len(rig.copies(stream)) == 2
