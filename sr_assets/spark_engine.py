"""The resource `spark`: a run's Spark session for the daily tables and users' assets.

A separate module, because `dagster_pyspark` imports pyspark, which is too slow for loading the definitions. It has no
`from __future__ import annotations`: Dagster reads the annotations of a resource's class.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import dagster as dg
from dagster_pyspark import PySparkResource
from pydantic import Field, PrivateAttr
from pyspark.sql import SparkSession

from sr_assets.adapters.spark.config import is_cluster
from sr_assets.adapters.spark.data_source import JetStreamDataSource
from sr_assets.adapters.spark.engine import KEEP_SECONDS, use_engine
from sr_assets.adapters.spark.run_session import HomeEngine
from sr_assets.adapters.spark.session import open_session
from sr_assets.settings import Settings

_CONNECT_MODE: Final = "SPARK_CONNECT_MODE_ENABLED"


class SparkEngine(PySparkResource):
    """A Spark session on the engine of `spark.mode`, which starts at its first use and ends with the run.

    Each run has its own session: closing a shared one would stop a site's work. `spark_config` sets Spark SQL options of this
    session; the engine's options are `spark.config` in the configuration.
    """

    settings: dg.ResourceDependency[Settings]
    spark_config: dict[str, Any] = Field(default={}, description="Options of Spark SQL for the session.")
    _session: Any = PrivateAttr(default=None)
    _ending: ExitStack = PrivateAttr(default_factory=ExitStack)

    @property
    def engine(self) -> HomeEngine:
        """The engine, on which the platform's own assets have a session of their own."""
        return HomeEngine(self.settings.spark, self.settings.home.resolve())

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Do nothing: the first use of `spark_session` starts the session."""

    @property
    def spark_session(self) -> "SparkSession":
        """The session; it has the data source `jetstream` on this host's engine, but not on a cluster."""
        if self._session is None:
            home = self.settings.home.resolve()
            # A site's name cannot contain a slash, so no site has this session.
            self._session = open_session(self.settings.spark, home, f"run/{uuid.uuid4()}")
            self._ending.enter_context(use_engine(home, KEEP_SECONDS))
            self._ending.enter_context(_ended(self._session))
            if not is_cluster(self.settings.spark.mode):
                self._session.dataSource.register(JetStreamDataSource)
            for option, value in self.spark_config.items():
                self._session.conf.set(option, value)
        session: SparkSession = self._session
        return session

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:  # noqa: ARG002  Dagster's signature
        """End the session."""
        self.close()

    def close(self) -> None:
        """End the session, if it was started; the engine stays warm for the next run."""
        self._session = None
        self._ending.close()


@contextmanager
def _ended(session: "SparkSession") -> Iterator[None]:
    """End a session on an engine after the block, to free its memory; a classic session ends with its process."""
    from pyspark.sql.connect.session import SparkSession as RemoteSession

    if not isinstance(session, RemoteSession):
        yield
        return
    # As PySpark's builder does: `pyspark.sql.functions` reads this variable to choose the kind of columns.
    outer = _CONNECT_MODE in os.environ
    os.environ[_CONNECT_MODE] = "1"
    try:
        yield
    finally:
        if not outer:
            del os.environ[_CONNECT_MODE]
        session.stop()
