"""Dagster resources: `platform`, `fleet_tables`, `data` and `spark`, and the names of the runs' tags and metadata.

The class of `spark` is in `spark_engine`, because it imports pyspark. This module has no `from __future__ import annotations`:
Dagster reads the annotations of a resource's class.
"""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import duckdb
from dagster_duckdb import DuckDBResource

from sr_assets.adapters.data import Source, current_settings, source_named
from sr_assets.adapters.logs import configure_logging
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.spark.engine import KEEP_ONCE_SECONDS, KEEP_SECONDS
from sr_assets.adapters.spark.run_session import HomeEngine, SparkResource, engine_of
from sr_assets.domain.errors import ConfigurationError
from sr_assets.settings import Settings, load_settings
from sr_assets.stages.site import Site, site_of_run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sr_assets.api import Form
    from sr_assets.spark_engine import SparkEngine

#: Tag of a run: `linger` (a sensor's run polls until its budget is used), `once` (a single run of the command line), or absent:
#: drain and end.
MODE_TAG = "sr_assets/mode"
LINGER = "linger"
ONCE = "once"
#: Tag of a run: its dynamic values, as JSON.
DATA_TAG = "sr_assets/data"
#: Tag of a run that a sensor requests from a launcher other than Dagster's default one: the place of the sensor's home.
HOME_TAG = "sr_assets/home"
#: Metadata of a hosted site's materialisation: the host run that recorded it.
HOST_KEY = "sr_assets/host"
#: Metadata of a failure: true if only a change of the configuration can help.
MISCONFIGURED = "misconfigured"
#: Metadata of a failure: true if the state of each failed stream has the error too.
NOTED = "noted"


def resource_keys(settings: Settings, *names: str) -> set[str]:
    """Return the keys of resources of the platform's own assets, such as `platform`, in this deployment."""
    return {settings.dagster.resource(name) for name in names}


def platform_of(context: dg.AssetExecutionContext, settings: Settings) -> "Platform":
    """Return the resource `platform` of an asset that needs its key."""
    platform: Platform = getattr(context.resources, settings.dagster.resource("platform"))
    return platform


def spark_of(context: dg.AssetExecutionContext, settings: Settings) -> SparkResource:
    """Return the resource `spark` of an asset that needs its key."""
    spark: SparkResource = getattr(context.resources, settings.dagster.resource("spark"))
    return spark


class Platform(dg.ConfigurableResource[Settings]):
    """The configured platform, from which a site's run opens the site.

    The settings are a resource dependency, not Dagster configuration, so that Dagster neither stores nor displays them.
    """

    settings: dg.ResourceDependency[Settings]

    def current(self) -> "Platform":
        """Return the platform with the present dynamic values of its settings, for one run."""
        settings = current_settings(self.settings)
        return self if settings is self.settings else Platform(settings=settings)

    def open_site(self, name: str, run_id: str, spark: SparkResource) -> Site:
        """Return a site, a context manager that holds its lock, state and connections; `spark` is the resource."""
        configure_logging(self.settings)
        return site_of_run(self.settings, name, run_id, engine_of(spark, self.settings.home.resolve()))


class FleetTables(DuckDBResource):
    """The published tables of `fleet.duckdb` (the path `database`), read-only; times are in UTC.

    `connection_config` sets DuckDB options of an open connection, for example `memory_limit`.
    """

    @contextmanager
    def get_connection(self) -> "Iterator[duckdb.DuckDBPyConnection]":
        """Open the current file read-only, and close it at the end of the block.

        A connection that stays open hides later publications from its process. Raises RunError, in one line, if no site has
        published yet.
        """
        with open_fleet(Path(self.database).parent) as connection:
            for option, value in self.connection_config.items():
                connection.execute(f"SET {option} = ?", [value])
            yield connection


class FleetTablesIOManager(dg.IOManager):
    """Gives the published tables of a home to assets as inputs, in the form of the input's annotation.

    The forms are a pandas DataFrame, which an input without annotation gets too, a `pyarrow.Table`, a `polars.DataFrame`
    and a `duckdb.DuckDBPyRelation`. The metadata `columns` and `where` of an input are those of `sr_assets.read`. Of a daily
    table, an asset gets the days that its partition maps to.
    """

    def __init__(self, home: Path) -> None:
        self._home = home

    def load_input(self, context: dg.InputContext) -> object:
        """Return the table named by the last part of the asset's key; raises the errors of `sr_assets.read`."""
        from sr_assets.api import read

        table, chosen = context.asset_key.path[-1], context.definition_metadata or {}
        where, days = chosen.get("where"), list(context.asset_partition_keys if context.has_asset_partitions else ())
        if days:
            of_days = f"date IN ({', '.join('?' * len(days))})"
            where = f"({where}\n) AND {of_days}" if where else of_days
        form = _form_of(table, context.dagster_type.typing_type)
        return read(table, chosen.get("columns"), where, days, as_=form, home=self._home)

    def handle_output(self, context: dg.OutputContext, obj: object) -> None:  # noqa: ARG002  the names of dg.IOManager
        """Refuse: runs of the platform write the published tables."""
        asset = context.asset_key.to_user_string() if context.has_asset_key else context.name
        raise ConfigurationError(f"{asset}: fleet_tables_io_manager only reads; give this asset another io_manager_key")


def _form_of(table: str, annotation: object) -> "Form":
    """Return the form of an input with an annotation; another annotation than a form's raises ConfigurationError."""
    import pandas as pd
    import pyarrow as pa

    forms: dict[object, Form] = {
        Any: "pandas",
        pd.DataFrame: "pandas",
        pa.Table: "arrow",
        duckdb.DuckDBPyRelation: "duckdb",
    }
    if polars := sys.modules.get("polars"):
        forms[polars.DataFrame] = "polars"
    if annotation not in forms:
        raise ConfigurationError(
            f"the input {table} is annotated with {annotation}; use pandas.DataFrame, pyarrow.Table,"
            " polars.DataFrame or duckdb.DuckDBPyRelation"
        )
    return forms[annotation]


@dg.io_manager(
    config_schema={"config": dg.Field(dg.Noneable(str), default_value=None, description="The configuration's file.")},
    description="Gives the published tables to assets as inputs: pandas, Arrow or DuckDB.",
)
def fleet_tables_io_manager(context: dg.InitResourceContext) -> FleetTablesIOManager:
    """Return the input manager of the home that the file `config` names, else SR_ASSETS_CONFIG, else `conf/replication.yaml`."""
    named = context.resource_config["config"]
    return FleetTablesIOManager(load_settings(Path(named) if named else None).home)


class DataSources(dg.ConfigurableResource[Settings]):
    """The sources of `data`, for users' assets: `data.source("ops").get("cadence")`.

    As in `Platform`, the settings are a resource dependency.
    """

    settings: dg.ResourceDependency[Settings]

    def source(self, name: str) -> Source:
        """Return a source, which is a context manager. Raises ConfigurationError for an unknown name."""
        return source_named(self.settings.data, name)


class PlatformSpark:
    """The resource `spark`: the platform's `engine` for its own assets, and a session of the run for users' assets.

    Both start at their first use, so that a run without work for Spark does not load it. `spark_session` is that of a
    `SparkEngine`, which is a `PySparkResource`.
    """

    def __init__(self, settings: Settings, keep_seconds: float) -> None:
        self.engine = HomeEngine(settings.spark, settings.home.resolve(), keep_seconds)
        self._settings = settings
        self._own: SparkEngine | None = None

    @property
    def spark_session(self) -> "SparkSession":
        """The run's own session."""
        if self._own is None:
            from sr_assets.spark_engine import SparkEngine

            self._own = SparkEngine(settings=self._settings)
        return self._own.spark_session

    def close(self) -> None:
        """End the run's own session, if it was started; the engine stays warm for the next run."""
        if self._own is not None:
            self._own.close()


def spark_resource(settings: Settings) -> dg.ResourceDefinition:
    """Return the resource `spark`, a `PlatformSpark` for the assets of one run."""

    def open_engine(context: dg.InitResourceContext) -> "Iterator[PlatformSpark]":
        mode = context.run.tags.get(MODE_TAG) if context.run else None
        with closing(PlatformSpark(settings, KEEP_ONCE_SECONDS if mode == ONCE else KEEP_SECONDS)) as spark:
            yield spark

    return dg.ResourceDefinition(open_engine, description="The platform's Spark engine, with a session for the run.")
