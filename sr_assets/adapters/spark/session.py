"""Spark sessions on the engine of `spark.mode`."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.private import own_folder
from sr_assets.adapters.spark.config import child_environment, engine_config, is_cluster
from sr_assets.adapters.spark.connect import close, is_remote, join_engine, join_server, set_options
from sr_assets.adapters.spark.engine import start_engine
from sr_assets.adapters.spark.remote_session import (
    check_series,
    cluster_config,
    explained,
    reach_cluster,
    ship_package,
    watched,
    without_secret,
)
from sr_assets.domain.errors import EngineLostError, ExecutorLostError, RunError, TransientError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from sr_assets.settings import SparkSettings

logger = logging.getLogger(__name__)
_OUR_ERRORS = re.compile(
    r"(?:sr_assets\.[\w.]*)?"
    r"((?:Wire|Silence|Refused|Denied|NoConsumer|Transient|ExecutorLost|Run|Api)Error): ([^\n]+)"
)
#: Errors that another attempt may not meet.
_KINDS = {
    "WireError": TransientError,
    "SilenceError": TransientError,
    "RefusedError": TransientError,
    "TransientError": TransientError,
    "ExecutorLostError": ExecutorLostError,
}
#: A Connect server that is unreachable, was restarted, or closed the session, which it does after idle time.
_GONE = (
    "StatusCode.UNAVAILABLE",
    "RETRIES_EXCEEDED",
    "NO_ACTIVE_SESSION",
    "INVALID_HANDLE.SESSION",
    "INVALID_HANDLE.OPERATION",
)
_LOST = re.compile(r"ExecutorLostFailure|Python worker exited unexpectedly|[Ee]xecutor heartbeat timed out")
#: The first lines of a classic session's error, which carry no information.
_WRAPPING = re.compile(r"An error occurred while calling|Exception thrown in awaitResult")


#: The session that the runs of a home share.
_SHARED: Final = "runs"


def open_session(settings: SparkSettings, home: Path, name: str = _SHARED) -> SparkSession:
    """Join a home's Spark session with this name on the engine of `spark.mode`.

    On a Connect server the session and its Python workers stay warm for the next run. Raises TransientError if the engine ends
    before it is joined, RunError without an engine.
    """
    mode = settings.mode
    if mode == "connect-local":
        try:
            engine = start_engine(settings, home)
        except RunError as error:
            logger.warning("%s; continuing with classic Spark in this process", error)
            return _classic("local[*,3]", settings, home)
        try:
            return join_engine(engine, home, name)
        except Exception as error:
            raise spark_error(error) from error
    if is_cluster(mode):
        return _open_on_cluster(settings, home, name)
    return _classic("local[*,3]", settings, home)


def _open_on_cluster(settings: SparkSettings, home: Path, name: str) -> SparkSession:
    """Return a session on a cluster; raises RunError with a missing requirement."""
    mode, folder = settings.mode, home / "spark"
    address = reach_cluster(mode)
    own_folder(folder)
    session = None
    try:
        if mode.startswith("sc://"):
            session = join_server(mode, folder, name)
            check_series(session)
            set_options(session, settings)
        else:
            session = _classic(mode, settings, home, cluster_config(address, folder))
        ship_package(session, folder)
        # It imports the work, which a process that only loads the definitions does not need.
        from sr_assets.adapters.spark.jobs import try_links

        with watched(session):
            for executor, _, error in try_links(session, {}):
                if error is not None:
                    raise RunError(f"Spark executor on {executor}: {error}")
    except Exception as error:
        failed = spark_error(error)
        if session is not None:
            leave_session(session)
        if isinstance(failed, EngineLostError):
            failed = RunError("no Spark Connect server responds; correct the address or start the server")
        kind = ExecutorLostError if isinstance(failed, ExecutorLostError) else RunError
        raise kind(f"spark.mode {without_secret(mode)}: {failed}") from error
    return session


def leave_session(session: SparkSession, *, forget: bool = False) -> None:
    """Close the connection to a session, which the next run joins unless the engine is to `forget` it.

    A classic session ends with its process.
    """
    if is_remote(session):
        close(session, forget=forget)


def shares_this_machine(session: SparkSession) -> bool:
    """Return whether a session's tasks run on this machine, as this user: those of classic Spark with a local master."""
    return not is_remote(session) and str(session.sparkContext.master).startswith("local")


def adopt_session(session: SparkSession, folder: Path) -> None:
    """Prepare a user's session for our tasks. Raises RunError with a missing requirement."""
    # It imports the work, which a process that only loads the definitions does not need.
    from sr_assets.adapters.spark.jobs import try_links

    try:
        if is_remote(session):
            check_series(session)
        if not shares_this_machine(session):
            ship_package(session, folder)
        for executor, _, error in try_links(session, {}):
            if error is not None:
                raise RunError(f"Spark executor on {executor}: {error}")
    except Exception as error:
        raise RunError(f"resource spark: {spark_error(error)}") from error


def stop_work(session: SparkSession, tag: str) -> None:
    """Interrupt a session's operations that have a tag."""
    with contextlib.suppress(Exception):  # a broken engine may be the reason
        session.interruptTag(tag)


def local_cores(settings: SparkSettings) -> int:
    """Return the number of parallel tasks of an engine on this machine."""
    named = re.match(r"local\[(\d+)", settings.config.get("spark.master", ""))
    if named:
        return int(named[1])
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _classic(master: str, settings: SparkSettings, home: Path, config: Mapping[str, str] | None = None) -> SparkSession:
    from pyspark.sql import SparkSession

    # Only needed to start a JVM; finding a Java takes as long as an idle run.
    environ = child_environment(home)
    os.environ.update(
        {key: value for key, value in environ.items() if key.startswith(("JAVA_", "PYSPARK_", "PYTHONSAFE"))}
    )
    if is_cluster(master):
        # Local file systems exist on no other machine.
        os.environ["PYSPARK_PYTHON"] = settings.config.get("spark.pyspark.python", "python3")
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(master).appName("sr-assets")
    for key, value in engine_config(settings, home, **(config or {})).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def spark_error(error: Exception) -> RunError:
    """Return one line about a failed Spark job: our message from the task if there is one."""
    if isinstance(error, RunError):
        return error
    text = str(error)
    ours = _OUR_ERRORS.findall(text)
    if ours:
        kind, text = ours[-1]
        return _KINDS.get(kind, RunError)(text.strip())
    if any(sign in text for sign in _GONE):
        return EngineLostError(
            "Spark no longer responds, or has closed the session; the batch is repeated in a new one"
        )
    if _LOST.search(text):
        return ExecutorLostError("the cluster repeatedly lost an executor; check its workers' logs")
    if lacking := explained(text):
        return RunError(lacking)
    lines = [line.strip(" :") for line in text.splitlines() if line.strip() and not _WRAPPING.search(line)]
    return RunError(f"Spark: {lines[0] if lines else type(error).__name__}"[:500])
