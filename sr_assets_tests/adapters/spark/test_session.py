"""A site's Spark session: shared by its runs, replaced when the server closed it; and runs in classic mode."""

import contextlib
import json
import logging
import socket
import struct

import psutil
import pytest
from pyspark.sql import SparkSession

from sr_assets.adapters.spark.engine import engine_status, start_engine
from sr_assets.adapters.spark.session import leave_session, open_session, spark_error
from sr_assets.domain.errors import TransientError
from sr_assets.settings import SparkSettings
from sr_assets_tests.rig import SITE, Rig, Sent


def session_id(session: SparkSession) -> str:
    """Return the server's id of a session; only the Spark Connect client has one."""
    return str(session.client._session_id)


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def listening_ports(process: psutil.Process) -> list[int]:
    return [each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]


def send_without_secret(port: int) -> bytes:
    """Send a request of Spark's own protocol without the secret; return the response, empty if there is none."""
    body = b"hello"
    request = struct.pack(">BqI", 3, 1, len(body)) + body
    with socket.create_connection(("127.0.0.1", port), timeout=2.0) as client_socket, contextlib.suppress(OSError):
        client_socket.sendall(struct.pack(">q", 8 + len(request)) + request)
        return client_socket.recv(65536)
    return b""


def test_runs_of_a_site_share_session_and_engine(rig: Rig) -> None:
    seen = set()
    for _ in range(2):
        session = open_session(SparkSettings(), rig.home, SITE)
        engine = engine_status(rig.home)
        assert engine is not None
        seen.add((engine.pid, session_id(session)))
        leave_session(session)
    assert len(seen) == 1
    other = open_session(SparkSettings(), rig.home, "PARIS")
    assert session_id(other) not in {identity for _, identity in seen}
    leave_session(other)


def test_open_session_replaces_session_closed_by_server(rig: Rig) -> None:
    session = open_session(SparkSettings(), rig.home, "CLOSED")
    session.client.release_session()
    leave_session(session)
    again = open_session(SparkSettings(), rig.home, "CLOSED")
    assert session_id(again) != session_id(session)
    assert again.range(3).count() == 3
    again.client.release_session()
    leave_session(again)


def test_spark_client_logger_stays_silent_when_enabled(rig: Rig) -> None:
    leave_session(open_session(SparkSettings(), rig.home, SITE))
    client = logging.getLogger("pyspark.sql.connect.logging")
    client.disabled = False  # as logging.config.dictConfig does to loggers that it does not name
    assert not client.isEnabledFor(logging.ERROR)


def test_start_engine_reuses_engine_with_equal_fingerprint(rig: Rig) -> None:
    engine = start_engine(SparkSettings(), rig.home)
    assert start_engine(SparkSettings(), rig.home) == engine
    assert engine.alive
    assert (rig.home / "spark" / "engine.json").stat().st_mode & 0o077 == 0


def test_driver_ports_refuse_clients_without_engine_secret(rig: Rig) -> None:
    engine = start_engine(SparkSettings(), rig.home)
    answers = [send_without_secret(port) for process in descendants(engine.pid) for port in listening_ports(process)]
    refusals = [answer for answer in answers if b"Expected SaslMessage" in answer]
    assert len(refusals) == 2, "of the driver and of its block manager"
    assert not [answer for answer in answers if b"org.apache.spark" in answer and answer not in refusals]


def test_run_succeeds_in_classic_mode_and_exits(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(json.dumps({"sender": f"n{n % 3}"}).encode()) for n in range(9)])
    rig.add(stream, inspect_field="sender", inspect_duration="10m", workers=2)
    with rig.start(spark={"mode": "classic"}) as child:
        printed, errors = child.communicate(timeout=180)
    assert printed.strip() == "[]", errors
    assert len(rig.copies(stream)) == 3
    assert rig.row("replication")["skipped_messages"] == 6


@pytest.mark.parametrize(
    ("kind", "transient"),
    (
        ("WireError", True),
        ("SilenceError", True),
        ("TransientError", True),
        ("DeniedError", False),
        ("RunError", False),
    ),
)
def test_spark_error_extracts_error_of_a_task(kind: str, transient: bool) -> None:
    text = (
        f"An exception was thrown from the Python worker.\n  File x\nsr_assets.adapters.wire.link.{kind}: host: gone\n"
    )
    error = spark_error(RuntimeError(text))
    assert (str(error), isinstance(error, TransientError)) == ("host: gone", transient)
