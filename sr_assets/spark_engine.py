"""The Spark engine as a Dagster resource, for the daily tables and for users' own assets.

Here: the session of one run. Not here: the engine and the sites' own sessions (`adapters.spark`). A module of its own,
because importing `dagster_pyspark` imports pyspark, which loading the definitions must not do. No `from __future__ import
annotations` here: Dagster reads the annotations of a resource's class.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import dagster as dg
from dagster_pyspark import PySparkResource
from pydantic import Field, PrivateAttr

from sr_assets.adapters.spark.engine import KEEP_SECONDS, use_engine
from sr_assets.adapters.spark.session import open_session
from sr_assets.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_CONNECT_MODE: Final = "SPARK_CONNECT_MODE_ENABLED"


class SparkEngine(PySparkResource):
    """A Spark session on the engine that `spark.mode` names, started at its first use and ended with the run.

    Each run has a session of its own: joining a site's session would stop that site's work. `spark_config` are options of Spark
    SQL for this session; those of the engine itself are `spark.config` in the configuration.
    """

    settings: dg.ResourceDependency[Settings]
    spark_config: dict[str, Any] = Field(default={}, description="Options of Spark SQL for the session.")
    _session: Any = PrivateAttr(default=None)
    _ending: ExitStack = PrivateAttr(default_factory=ExitStack)

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Start nothing: the first use of `spark_session` starts the session."""

    @property
    def spark_session(self) -> "SparkSession":
        """The session; the data source `jetstream` is registered in it on this host's engine, not on a cluster."""
        if self._session is None:
            home = self.settings.home.resolve()
            # A site's name has no slash, so this cannot be a site's session.
            self._session = open_session(self.settings.spark, home, f"run/{uuid.uuid4()}")
            self._ending.enter_context(use_engine(home, KEEP_SECONDS))
            self._ending.enter_context(_ended(self._session))
            for option, value in self.spark_config.items():
                self._session.conf.set(option, value)
        session: SparkSession = self._session
        return session

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:  # noqa: ARG002  Dagster's signature
        """End the session, if one was started; the engine stays warm for the next run."""
        self._session = None
        self._ending.close()


@contextmanager
def _ended(session: "SparkSession") -> Iterator[None]:
    """End a session on an engine with `with`, so that its memory is given back; a classic one ends with its process."""
    from pyspark.sql.connect.session import SparkSession as RemoteSession

    if not isinstance(session, RemoteSession):
        yield
        return
    # As PySpark's own builder does: `pyspark.sql.functions` reads it to know for which kind of session it makes columns.
    outer = _CONNECT_MODE in os.environ
    os.environ[_CONNECT_MODE] = "1"
    try:
        yield
    finally:
        if not outer:
            del os.environ[_CONNECT_MODE]
        session.stop()
