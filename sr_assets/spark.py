"""The Spark format `jetstream` for any PySpark session: batch, streaming and write, without a configuration of this package."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


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
