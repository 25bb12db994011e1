"""A site's session: the same one for every run, another when the server closed it, and the same code without a server."""

import contextlib
import json
import logging
import socket
import struct
from dataclasses import replace

import psutil
import pytest
from pyspark.sql import SparkSession

from sr_assets.adapters.spark.config import engine_config
from sr_assets.adapters.spark.engine import engine_status, start_engine
from sr_assets.adapters.spark.session import leave_session, open_session, spark_error
from sr_assets.domain.errors import TransientError
from sr_assets.settings import SparkSettings
from sr_assets_tests.rig import SITE, Rig, Sent


def session_id(session: SparkSession) -> str:
    """Return by what the server knows a session; only the client of Spark Connect has it."""
    return str(session.client._session_id)


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def listening(process: psutil.Process) -> list[int]:
    return [each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]


def ask(port: int) -> bytes:
    """Send a request of Spark's own protocol, as a stranger would, and return what comes back, if anything does."""
    body = b"hello"
    request = struct.pack(">BqI", 3, 1, len(body)) + body
    with socket.create_connection(("127.0.0.1", port), timeout=2.0) as stranger, contextlib.suppress(OSError):
        stranger.sendall(struct.pack(">q", 8 + len(request)) + request)
        return stranger.recv(65536)
    return b""


def test_every_run_of_a_site_joins_the_same_session_of_the_same_engine(rig: Rig) -> None:
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


def test_a_session_the_server_closed_is_followed_by_another(rig: Rig) -> None:
    session = open_session(SparkSettings(), rig.home, "CLOSED")
    session.client.release_session()
    leave_session(session)
    again = open_session(SparkSettings(), rig.home, "CLOSED")
    assert session_id(again) != session_id(session)
    assert again.range(3).count() == 3
    again.client.release_session()
    leave_session(again)


def test_sparks_client_is_silent_whoever_sets_up_logging_later(rig: Rig) -> None:
    leave_session(open_session(SparkSettings(), rig.home, SITE))
    client = logging.getLogger("pyspark.sql.connect.logging")
    client.disabled = False  # as logging.config.dictConfig does to all that it does not name
    assert not client.isEnabledFor(logging.ERROR)


def test_other_settings_and_other_code_mean_another_engine(rig: Rig) -> None:
    engine = start_engine(SparkSettings(), rig.home)
    assert start_engine(SparkSettings(), rig.home) == engine
    assert engine_config(SparkSettings(), rig.home) != engine_config(
        SparkSettings(config={"spark.driver.memory": "1g"}), rig.home
    )
    # Whoever finds an engine that was started with something else stops it: here only the record says so.
    assert replace(engine, fingerprint="other") != engine
    assert engine.alive
    assert (rig.home / "spark" / "engine.json").stat().st_mode & 0o077 == 0


def test_the_drivers_ports_answer_nobody_without_the_engines_secret(rig: Rig) -> None:
    engine = start_engine(SparkSettings(), rig.home)
    answers = [ask(port) for process in descendants(engine.pid) for port in listening(process)]
    refusals = [answer for answer in answers if b"Expected SaslMessage" in answer]
    assert len(refusals) == 2, "the driver's and its block manager's"
    assert not [answer for answer in answers if b"org.apache.spark" in answer and answer not in refusals]


def test_the_same_code_runs_in_classic_spark_and_its_process_ends(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(json.dumps({"sender": f"n{n % 3}"}).encode()) for n in range(9)])
    rig.add(stream, inspect_field="sender", inspect_duration="10m", workers=2)
    with rig.start(spark={"mode": "classic"}) as child:
        printed, said = child.communicate(timeout=180)
    assert printed.strip() == "[]", said
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
def test_the_error_of_a_task_is_found_in_what_spark_says_of_it(kind: str, transient: bool) -> None:
    text = (
        f"An exception was thrown from the Python worker.\n  File x\nsr_assets.adapters.wire.link.{kind}: host: gone\n"
    )
    error = spark_error(RuntimeError(text))
    assert (str(error), isinstance(error, TransientError)) == ("host: gone", transient)
