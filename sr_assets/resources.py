"""The Dagster resources: the platform for our own assets, Spark for the daily tables and users' assets, the published
tables for users' assets.

Add a resource that an asset takes as a parameter here. Not here: what a run does with it (`stages`), the assets themselves,
the Spark resource's class (`spark_engine`), which would load pyspark with the definitions. No `from __future__ import
annotations` here: Dagster reads the annotations of a resource's class.
"""

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import dagster as dg
from dagster_duckdb import DuckDBResource

from sr_assets.adapters.logs import note_run, open_log
from sr_assets.adapters.published.reading import open_fleet
from sr_assets.adapters.spark.engine import KEEP_ONCE_SECONDS, KEEP_SECONDS
from sr_assets.settings import Settings
from sr_assets.stages.site import Site

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import duckdb

    from sr_assets.spark_engine import SparkEngine

#: Tag of a run: `linger` (the sensors' runs wait for more until their budget is used), `once` (a single run of the
#: command line) or nothing: drain and end.
MODE_TAG = "sr_assets/mode"
LINGER = "linger"
ONCE = "once"
#: Metadata of a materialisation that a run recorded for a queued site: that run, the host.
HOST_KEY = "sr_assets/host"
#: Metadata of a failure: true when another run cannot help, only another configuration.
MISCONFIGURED = "misconfigured"
#: Metadata of a failure: true when the state of each stream that failed says so too.
NOTED = "noted"


class Platform(dg.ConfigurableResource[Settings]):
    """The configured platform, from which a run of a site's assets opens the site.

    The settings are a resource dependency, not Dagster configuration, so that Dagster neither stores nor shows them.
    """

    settings: dg.ResourceDependency[Settings]

    def open_site(
        self, name: str, run_id: str, mode: str | None, sites_served: "Callable[[], int]" = lambda: 1
    ) -> Site:
        """Return a site to be entered with `with`: its lock, state and connections last until the end of the block.

        `mode` is the run's `MODE_TAG`: after a single run of the command line the engine stays warm for less time.
        `sites_served` says how many sites this process serves.
        """
        configure_logging(self.settings)
        note_run(name, run_id)
        keep_seconds = KEEP_ONCE_SECONDS if mode == ONCE else KEEP_SECONDS
        return Site(
            self.settings,
            name,
            owner=f"run {run_id}",
            run_id=run_id,
            keep_engine_seconds=keep_seconds,
            sites_served=sites_served,
        )


class FleetTables(DuckDBResource):
    """The published tables of `fleet.duckdb`, the file that `database` names, read-only; times are in UTC.

    `connection_config` are options of DuckDB that can be set on an open connection, for example `memory_limit`.
    """

    @contextmanager
    def get_connection(self) -> "Iterator[duckdb.DuckDBPyConnection]":
        """Open the current file read-only; closed at the end of `with`, also after an exception.

        Within one process a connection that stays open hides every later publication. Raises RunError, one line, when
        nothing was published yet.
        """
        with open_fleet(Path(self.database).parent) as connection:
            for option, value in self.connection_config.items():
                connection.execute(f"SET {option} = ?", [value])
            yield connection


def spark_resource(settings: Settings) -> dg.ResourceDefinition:
    """Return the resource `spark`: a `SparkEngine` for the assets of one run; its class is loaded at its first use."""

    def open_engine(context: dg.InitResourceContext) -> "Iterator[SparkEngine]":
        from sr_assets.spark_engine import SparkEngine

        engine = SparkEngine(settings=settings)
        engine.setup_for_execution(context)
        try:
            yield engine
        finally:
            engine.teardown_after_execution(context)

    return dg.ResourceDefinition(open_engine, description="A Spark session of the run's own on the platform's engine.")


def configure_logging(settings: Settings) -> None:
    """Send our log where the settings say; once per process."""
    open_log(settings.loglevel, settings.log_format, settings.logfile)
