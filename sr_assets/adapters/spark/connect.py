"""Spark Connect sessions, on this host's engine and on a cluster's server: joining, reusing and leaving."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from sr_assets.adapters.private import write_private
from sr_assets.adapters.spark.config import session_config, source_digest
from sr_assets.adapters.spark.engine import HOST, Engine
from sr_assets.domain.errors import EngineLostError, RunError

if TYPE_CHECKING:
    import grpc
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.client import DefaultChannelBuilder

    from sr_assets.settings import SparkSettings

#: The logger on which Spark's client repeats every error as JSON with a traceback; Dagster's logging would enable it.
_CLIENT_LOG: Final = "pyspark.sql.connect.logging"
_RETRIES: Final = 6
_LONGEST_PAUSE_MS: Final = 2_000


def is_remote(session: SparkSession) -> bool:
    # Not by its attributes: attributes that a classic session lacks raise Spark errors.
    return type(session).__module__.startswith("pyspark.sql.connect")


def join_engine(engine: Engine, home: Path, name: str) -> SparkSession:
    """Join a home's session with this name on this host's engine. Raises EngineLostError if another user listens on its port."""
    if not engine.listens_for_us:
        raise EngineLostError(
            f"Spark engine: no process of this user listens on port {engine.port}; the batch is repeated in a new engine"
        )
    url = f"sc://localhost:{engine.port}"
    # A session that the server closed (for example after an idle day) can never be joined again; a new id can.
    for generation in range(16):
        identity = uuid.uuid5(uuid.NAMESPACE_URL, f"{home}/{engine.pid}/{engine.started_at}/{name}/{generation}")
        # uuid5 with the version bits of uuid4, which the client requires.
        if session := _join(url, uuid.UUID(int=identity.int, version=4), engine):
            return session
    raise RunError(f"the Spark engine (pid {engine.pid}) refuses every session; run `sr-assets spark stop`")


def join_server(mode: str, folder: Path, name: str) -> SparkSession:
    """Join a session on a cluster's server: the one recorded in `folder` by its name if it still exists.

    A session per run would keep a Python process on each executor until
    the server ends. Ids are random, so that they are unique.
    """
    if "/" in name:  # a session of one run, which ends it
        return _new_session(mode, uuid.uuid4())
    record = folder / f"session-{uuid.uuid5(uuid.NAMESPACE_URL, name)}.json"
    # A server identifies a session's files by name: another version of our source needs another session.
    wanted = {"mode": mode.partition(";")[0], "source": source_digest()}
    if (identity := _recorded(record, wanted)) and (session := _join(mode, identity)):
        return session
    identity = uuid.uuid4()
    # Recorded before the session exists, so that the run after a killed one can interrupt it.
    write_private(record, json.dumps({**wanted, "session": str(identity)}), durable=False)
    return _new_session(mode, identity)


def _recorded(record: Path, wanted: Mapping[str, str]) -> uuid.UUID | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        recorded = json.loads(record.read_text())
        if all(recorded[key] == value for key, value in wanted.items()):
            return uuid.UUID(recorded["session"])
    return None


def _new_session(mode: str, identity: uuid.UUID) -> SparkSession:
    session = _join(mode, identity)
    if session is None:
        raise RunError("the server closes every new session immediately; check its log")
    return session


def set_options(session: SparkSession, settings: SparkSettings) -> None:
    """Set our options and `spark.config` on a cluster's session; raises RunError for a refused one."""
    for key, value in session_config(settings).items():
        try:
            session.conf.set(key, value)
        except Exception as error:
            line = str(error).splitlines()[0]
            if "CANNOT_MODIFY" in line:
                line = "a Connect server fixes it at its start; set it there, and remove it here"
            raise RunError(f"spark.config {key}: {line}") from error


def _join(url: str, identity: uuid.UUID, engine: Engine | None = None) -> SparkSession | None:
    """Return the session with this id, or None if the server has closed it."""
    session = _connect(url, identity, engine)
    try:
        session.conf.get("spark.sql.session.timeZone")
    except Exception as error:
        close(session)
        if "SESSION_CLOSED" not in str(error):
            raise
        return None
    return session


def _connect(url: str, identity: uuid.UUID, engine: Engine | None) -> SparkSession:
    from pyspark.sql.connect.client.retries import DefaultPolicy
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    if "SPARK_CONNECT_LOG_LEVEL" not in os.environ:
        logging.getLogger(_CLIENT_LOG).setLevel(logging.CRITICAL + 1)
    # The following error has the same content.
    warnings.filterwarnings("ignore", r"\[RETRIES_EXCEEDED\]")
    separator = "" if url.rstrip().endswith(";") else "/;" if url.count("/") < 3 else ";"
    builder = _channel_builder(f"{url}{separator}session_id={identity}", engine)
    session = ConnectSession.builder.channelBuilder(builder).create()
    # By default the client retries for ten minutes, for servers that move; our next run restarts the server instead.
    session.client.set_retry_policies([DefaultPolicy(max_retries=_RETRIES, max_backoff=_LONGEST_PAUSE_MS)])
    return cast("SparkSession", session)


def _channel_builder(url: str, engine: Engine | None) -> DefaultChannelBuilder:
    """Return a builder of connections that send a token unencrypted to 127.0.0.1 alone.

    gRPC resolves `localhost` to `::1` first, where any user may listen. An `engine` gets its token only while a process of
    this user listens on its port: the client connects again by itself, also to the port of an engine that has ended.
    """
    import grpc
    from pyspark.sql.connect.client import DefaultChannelBuilder

    class Builder(DefaultChannelBuilder):
        @property
        def endpoint(self) -> str:
            local = self.host == "localhost" and not self.use_ssl
            return f"ipv4:{HOST}:{self._port}" if local else str(super().endpoint)

        def toChannel(self) -> grpc.Channel:  # noqa: N802  the name is the base class's
            if engine is None:
                return super().toChannel()
            # A proxy of the environment would get the token.
            self.setChannelOption("grpc.enable_http_proxy", 0)
            verified = grpc.metadata_call_credentials(_VerifiedToken(engine))
            credentials = grpc.composite_channel_credentials(grpc.local_channel_credentials(), verified)
            return self._secure_channel(self.endpoint, credentials)

    return Builder(url)


class _VerifiedToken:
    """An engine's token for each request, after a look at who listens: gRPC's AuthMetadataPlugin."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(
        self, _context: object, callback: Callable[[Iterable[tuple[str, str]], Exception | None], None]
    ) -> None:
        if self._engine.listens_for_us:
            callback((("authorization", f"Bearer {self._engine.token}"),), None)
        else:
            callback((), ConnectionError("no process of this user listens on the engine's port"))


def close(session: SparkSession, *, forget: bool = False) -> None:
    """Close the connection to a session, which the next run joins unless the server is to `forget` it.

    Otherwise the client cleans up at the process's exit, and waits ten minutes for a server that has ended.
    """
    if forget:
        with contextlib.suppress(Exception):  # the server closes it after a long idle time
            session.client.release_session()
    session.client.close()
