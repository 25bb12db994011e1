"""A site's Spark session, on the engine that `spark.mode` names.

Not here: the local server (`spark.engine`), what runs in a session (`spark.source`, `spark.sink`, the stages).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sr_assets.adapters.private import own_folder
from sr_assets.adapters.spark.cluster import check_series, cluster_config, explained, reach_cluster, ship_package, shown
from sr_assets.adapters.spark.config import child_environment, engine_config, is_cluster, source_digest
from sr_assets.adapters.spark.engine import Engine, start_engine
from sr_assets.domain.errors import EngineLostError, ExecutorLostError, RunError, TransientError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

    from sr_assets.settings import SparkSettings

logger = logging.getLogger(__name__)

#: The logger on which Spark's client logs every error again, as JSON with a trace; Dagster's logging would enable it.
_CLIENT_LOG = "pyspark.sql.connect.logging"
_RETRIES = 6
_LONGEST_PAUSE_MS = 2_000


def open_session(settings: SparkSettings, home: Path, site: str) -> SparkSession:
    """Join this site's Spark session on the engine that `spark.mode` names, and interrupt an earlier run's tasks in it.

    Every run of a site uses the same session id: the session stays warm, and a run that joins it can interrupt tasks whose
    client was killed. Data source `jetstream` is registered. Raises TransientError when the engine ends before it is
    joined.
    """
    mode = settings.mode
    if mode == "connect-local":
        try:
            engine = start_engine(settings, home)
        except RunError as error:
            logger.warning("%s; going on with classic Spark in this process", error)
            return _prepared(_classic("local[*,3]", settings, home))
        try:
            return _prepared(_join(engine, home, site))
        except Exception as error:
            raise spark_error(error) from error
    if is_cluster(mode):
        return _open_on_cluster(settings, home, site)
    return _prepared(_classic("local[*,3]", settings, home))


def _open_on_cluster(settings: SparkSettings, home: Path, site: str) -> SparkSession:
    """Return a session on a cluster that shares nothing with us; raises RunError with what it lacks."""
    mode, folder = settings.mode, home / "spark"
    address = reach_cluster(mode)
    own_folder(folder)
    try:
        if mode.startswith("sc://"):
            # A server knows a session's files by their names: another source of ours needs another session.
            identity = uuid.uuid5(uuid.NAMESPACE_URL, f"sr-assets/{home}/{site}/{source_digest()}")
            session = _connect(mode, identity)
            check_series(session)
            session.interruptAll()
        else:
            session = _classic(mode, settings, home, cluster_config(address, folder))
        ship_package(session, folder)
        # It imports Spark, which a process that only loads the definitions does without.
        from sr_assets.adapters.spark.remote import try_remotely

        for executor, _, error in try_remotely(session, {}):
            if error is not None:
                raise RunError(f"Spark executor on {executor}: {error}")
    except Exception as error:
        raise RunError(f"spark.mode {shown(mode)}: {spark_error(error)}") from error
    return session


def leave_session(session: SparkSession) -> None:
    """Close the connection to a session without ending the session: the next run of the site joins it.

    Without this the client cleans up when the process exits, and waits ten minutes for a server that has ended by then.
    A classic session is the process's own and ends with it.
    """
    if _is_remote(session):
        session.client.close()


def stop_work(session: SparkSession) -> None:
    """Interrupt the tasks of a session that is given up."""
    if _is_remote(session):
        with contextlib.suppress(Exception):  # a broken engine may be the reason
            session.interruptAll()


def local_cores(settings: SparkSettings) -> int:
    """Return how many tasks an engine on this machine runs at a time."""
    named = re.match(r"local\[(\d+)", settings.config.get("spark.master", ""))
    if named:
        return int(named[1])
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_cores(session: SparkSession) -> int:
    """Return how many tasks a cluster runs at a time: into so many parts Spark cuts what nobody else has cut."""
    from pyspark.sql.functions import spark_partition_id

    return session.range(1 << 16).select(spark_partition_id()).distinct().count()


def _is_remote(session: SparkSession) -> bool:
    # Not by its attributes: those that a classic session lacks raise an error of Spark's own.
    return type(session).__module__.startswith("pyspark.sql.connect")


def _join(engine: Engine, home: Path, site: str) -> SparkSession:
    os.environ["SPARK_CONNECT_AUTHENTICATE_TOKEN"] = engine.token
    # A session that the server closed (for example after an idle day) can never be joined again; a new id can.
    for generation in range(16):
        identity = uuid.uuid5(uuid.NAMESPACE_URL, f"{home}/{engine.pid}/{engine.started_at}/{site}/{generation}")
        session = _connect(f"sc://localhost:{engine.port}", identity)
        try:
            session.conf.get("spark.sql.session.timeZone")
        except Exception as error:
            leave_session(session)
            if "SESSION_CLOSED" not in str(error):
                raise
        else:
            return session
    raise RunError(
        f"the Spark engine (pid {engine.pid}) refuses every session of site {site}; run `sr-assets spark stop`"
    )


def _connect(url: str, identity: uuid.UUID) -> SparkSession:
    from pyspark.sql.connect.client.retries import DefaultPolicy
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    if "SPARK_CONNECT_LOG_LEVEL" not in os.environ:
        logging.getLogger(_CLIENT_LOG).setLevel(logging.CRITICAL + 1)
    # uuid5 with the version bits of uuid4, which is what the client insists on.
    session_id = str(uuid.UUID(int=identity.int, version=4))
    separator = "" if url.rstrip().endswith(";") else "/;" if url.count("/") < 3 else ";"
    session = ConnectSession.builder.remote(f"{url}{separator}session_id={session_id}").create()
    # The client retries for ten minutes by default, for servers that move; ours is restarted by the next run instead.
    session.client.set_retry_policies([DefaultPolicy(max_retries=_RETRIES, max_backoff=_LONGEST_PAUSE_MS)])
    return cast("SparkSession", session)


def _classic(master: str, settings: SparkSettings, home: Path, config: Mapping[str, str] | None = None) -> SparkSession:
    from pyspark.sql import SparkSession

    # Only needed to start a JVM; finding a Java takes as long as an idle run.
    environ = child_environment(home)
    os.environ.update(
        {key: value for key, value in environ.items() if key.startswith(("JAVA_", "PYSPARK_", "PYTHONSAFE"))}
    )
    if is_cluster(master):
        # Ours is on no other machine.
        os.environ["PYSPARK_PYTHON"] = settings.config.get("spark.pyspark.python", "python3")
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(master).appName("sr-assets")
    for key, value in engine_config(settings, home, **(config or {})).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _prepared(session: SparkSession) -> SparkSession:
    from sr_assets.adapters.spark.source import JetStreamDataSource

    # Tasks of an earlier run of this site must not go on beside this run's.
    if _is_remote(session):
        session.interruptAll()
    session.dataSource.register(JetStreamDataSource)
    return session


_OUR_ERRORS = re.compile(
    r"(?:sr_assets\.[\w.]*)?"
    r"(WireError|DeniedError|NoConsumerError|TransientError|ExecutorLostError|RunError|ApiError): ([^\n]+)"
)


#: What of them another attempt may not meet.
_KINDS = {"WireError": TransientError, "TransientError": TransientError, "ExecutorLostError": ExecutorLostError}
_LOST = re.compile(r"ExecutorLostFailure|Python worker exited unexpectedly|[Ee]xecutor heartbeat timed out")


def spark_error(error: Exception) -> RunError:
    """Return one line about a failed Spark job: our own message from the task when there is one."""
    if isinstance(error, RunError):
        return error
    text = str(error)
    ours = _OUR_ERRORS.findall(text)
    if ours:
        kind, text = ours[-1]
        return _KINDS.get(kind, RunError)(text.strip())
    if any(sign in text for sign in ("StatusCode.UNAVAILABLE", "RETRIES_EXCEEDED", "NO_ACTIVE_SESSION")):
        return EngineLostError("the Spark engine does not answer any more; another is started")
    if _LOST.search(text):
        return ExecutorLostError("the cluster lost an executor again and again: look at its workers' logs")
    if lacking := explained(text):
        return RunError(lacking)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return RunError(f"Spark: {lines[0] if lines else type(error).__name__}"[:500])
