"""A site's Spark session: shared by its runs, replaced when the server closed it; and runs in classic mode."""

import contextlib
import json
import logging
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import grpc
import psutil
import pytest
from pyspark.sql import SparkSession

from sr_assets.adapters.connection_file import pack_cluster
from sr_assets.adapters.private import own_folder
from sr_assets.adapters.spark import watch as watcher
from sr_assets.adapters.spark.config import engine_config, fingerprint
from sr_assets.adapters.spark.connect import _channel_builder, join_engine
from sr_assets.adapters.spark.engine import (
    Engine,
    _is_renewable,
    engine_status,
    is_warm,
    renew_engine,
    start_engine,
    use_engine,
)
from sr_assets.adapters.spark.jobs import try_links
from sr_assets.adapters.spark.session import leave_session, open_session, spark_error
from sr_assets.domain.errors import EngineLostError, TransientError
from sr_assets.settings import ClusterSettings, SparkSettings
from sr_assets_tests.rig import PATIENCE_SECONDS, SITE, Rig, Sent, address
from sr_assets_tests.servers import free_port
from sr_assets_tests.strangers import stranger_listens


def session_id(session: SparkSession) -> str:
    """Return the server's id of a session; only the Spark Connect client has one."""
    return str(session.client._session_id)


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def listening_ports(process: psutil.Process) -> list[int]:
    """Return the ports on which a process listens; one that has ended meanwhile listens on none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    return []


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


def test_probe_from_an_executor_names_the_unreachable_server(rig: Rig) -> None:
    links = {
        "open": pack_cluster(address(rig.source)),
        "closed": pack_cluster(ClusterSettings((f"127.0.0.1:{free_port()}",))),
    }
    session = open_session(SparkSettings(), rig.home, SITE)
    tried = {link: error for _, link, error in try_links(session, links)}
    leave_session(session)
    assert tried["open"] is None
    assert "Connection refused" in (tried["closed"] or "")


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


def test_engine_keeps_its_temporary_files_in_the_home(rig: Rig) -> None:
    session = open_session(SparkSettings(), rig.home, SITE)
    assert session.range(3).count() == 3
    engine = engine_status(rig.home)
    assert engine is not None
    for process in descendants(engine.pid):
        with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
            command = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")
            if "org.apache.spark.deploy.SparkSubmit" in command:
                assert f"-Djava.io.tmpdir={rig.home / 'spark'}" in command
                loaded = re.findall(r"/\S+\.so\b", Path(f"/proc/{process.pid}/maps").read_text())
                assert not [library for library in loaded if Path(library).parent == Path(tempfile.gettempdir())]
                break
    else:
        pytest.fail("the engine has no JVM")
    leave_session(session)


def test_engine_secret_never_reaches_listener_on_ipv6_loopback(rig: Rig) -> None:
    engine = start_engine(SparkSettings(), rig.home)
    with stranger_listens(f"::1:{engine.port}") as stranger:
        session = open_session(SparkSettings(), rig.home, SITE)
        assert session.range(3).count() == 3
        leave_session(session)
    assert stranger.received == b""


@pytest.mark.process
def test_engine_of_another_user_is_not_joined(tmp_path: Path) -> None:
    port = free_port()
    with stranger_listens(f"127.0.0.1:{port}", f"::1:{port}") as stranger:
        engine = Engine(port, os.getpid(), "the-token", "", 0.0)
        with patch.object(Engine, "running", True):
            assert not engine.alive
            with pytest.raises(EngineLostError, match=f"no process of this user listens on port {port};"):
                join_engine(engine, tmp_path, SITE)
    assert stranger.received == b""


@pytest.mark.process
def test_connection_to_a_lost_engine_gives_no_token_to_its_successor() -> None:
    port = free_port()
    engine = Engine(port, os.getpid(), "the-token", "", 0.0)
    with patch.object(Engine, "listens_for_us", True):
        builder = _channel_builder(f"sc://localhost:{port}", engine)
    with stranger_listens(f"127.0.0.1:{port}", f"::1:{port}") as stranger, builder.toChannel() as channel:
        call = channel.unary_unary("/spark.connect.SparkConnectService/Config")
        with pytest.raises(grpc.RpcError, match="no process of this user listens on the engine's port"):
            call(b"", timeout=PATIENCE_SECONDS, wait_for_ready=True)
    assert b"connected" in stranger.received
    assert not [word for word in (b"the-token", b"authorization", b"Config") if word in stranger.received]


@pytest.mark.parametrize(
    ("server", "endpoint"),
    (
        ("localhost:7/;token=t", "ipv4:127.0.0.1:7"),
        ("localhost:7", "ipv4:127.0.0.1:7"),
        ("localhost:7/;token=t;use_ssl=true", "localhost:7"),
        ("spark.example:7/;token=t", "spark.example:7"),
    ),
)
def test_localhost_is_not_resolved_for_an_unencrypted_token(server: str, endpoint: str) -> None:
    assert _channel_builder(f"sc://{server}", None).endpoint == endpoint


#: A process that looks like an engine, until its input ends.
_LISTENER = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@pytest.mark.process
def test_lost_engine_is_replaced_with_a_new_token_once_unused(tmp_path: Path) -> None:
    settings, folder = SparkSettings(), tmp_path / "spark"
    command = [sys.executable, "-I", "-c", _LISTENER, watcher.__name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        engine = Engine(port, process.pid, "the-token", fingerprint(engine_config(settings, tmp_path)), 0.0)
        own_folder(folder)
        (folder / "engine.json").write_text(json.dumps(asdict(engine)))
        assert not _is_renewable(folder, engine)
        assert is_warm(settings, tmp_path)
        renew_engine(tmp_path)
        assert _is_renewable(folder, engine)
        assert not is_warm(settings, tmp_path)
        with use_engine(tmp_path, 0.0):
            assert not _is_renewable(folder, engine)
            assert is_warm(settings, tmp_path)
        assert not _is_renewable(folder, replace(engine, pid=engine.pid + 1))
        process.communicate()


def test_run_succeeds_in_classic_mode_and_exits(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(json.dumps({"sender": f"n{n % 3}"}).encode()) for n in range(9)])
    rig.add(stream, inspect_field="sender", inspect_duration="10m", workers=2)
    with rig.start(spark={"mode": "classic"}) as child:
        printed, errors = child.communicate(timeout=PATIENCE_SECONDS)
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
