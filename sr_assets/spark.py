"""For any PySpark session: the format `jetstream` (batch, streaming and write), and the published tables of a home."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def register(spark: SparkSession) -> None:
    """Register the format `jetstream` in a session.

    It enables the push-down of filters for Python data sources in this session, because the format supports it. The package
    must be installed for every executor's Python: a local session without PYSPARK_PYTHON uses this process's.
    """
    from sr_assets.adapters.spark.data_source import JetStreamDataSource

    # A Connect session has no context; its server chooses the Python.
    context = getattr(spark, "_sc", None)
    if context is not None and context.master.startswith("local") and "PYSPARK_PYTHON" not in os.environ:
        context.pythonExec = sys.executable
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(JetStreamDataSource)


def read_table(
    spark: SparkSession,
    table: str,
    config: str | os.PathLike[str] | None = None,
    *,
    home: str | os.PathLike[str] | None = None,
) -> DataFrame:
    """Return a published table or view as of the last publication, in a session whose executors see the files of the home.

    Spark reads the Parquet files; only small tables pass this process: `snapshot_info`, `site_leaders`, `operator_actions`,
    `heartbeats`, `hops` and `v_nodes_at_several_sites`. The files stay as long as the DataFrame exists, and at least ten
    minutes longer. `config`, `home` and the errors are those of `sr_assets.read`. JSON is text.
    """
    from sr_assets.adapters.spark import fleet_tables
    from sr_assets.api import home_of

    return fleet_tables.read_table(spark, table, home_of(home, config))
