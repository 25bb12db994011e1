"""Whole sites over TLS with client certificates, with credentials, and of Choria, which leak no secrets."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.spark.engine import stop_engine
from sr_assets.cli import run_command
from sr_assets.settings import load_settings
from sr_assets_tests.choria_broker import Issuer, broker
from sr_assets_tests.forks import run_forked
from sr_assets_tests.rig import Rig, Sent, files_with, in_background
from sr_assets_tests.secured import Authority, Operator, creds, new_key
from sr_assets_tests.servers import NatsServer


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def secured(authority: Authority, engine_home: Path, tmp_path: Path, unique: Callable[[str], str]) -> Iterator[Rig]:
    """A rig whose servers require a client certificate."""
    config = authority.block(**authority.certify("127.0.0.1"), verify=True)
    with (
        NatsServer(tmp_path / "source", "source", config=config) as source,
        NatsServer(tmp_path / "target", "target", config=config) as target,
    ):
        tls = {"ca": str(authority.file), **authority.certify("replicator@example.net")}
        yield Rig(engine_home, source, target, unique, tls)


def test_site_runs_over_tls_with_client_certificates(secured: Rig) -> None:
    stream, advisories, plain = secured.make(), secured.make("ADV"), secured.make("PLAIN")
    nodes = [f"web{n}" for n in range(20)]
    secured.publish(stream, [Sent(json.dumps({"sender": node}).encode() + b" " * 20_000) for node in nodes * 2])
    secured.publish(plain, [Sent(b"%d" % n) for n in range(100)])
    advisory = {"subject": f"{advisories}.%s.%v", "reliable": True}
    secured.add(stream, inspect_field="sender", inspect_duration="1h", advisory=advisory)
    secured.add(plain)
    secured.drain()
    assert len(secured.copies(stream)) == len(nodes)
    assert [message.payload for message in secured.copies(plain)] == [b"%d" % n for n in range(100)]
    assert {row["node"] for row in secured.rows("last_seen_nodes")} == set(nodes)
    assert len(secured.stored(advisories)) == len(nodes)
    with secured.open() as site:
        connection_file = Path(site.files.path(site.streams[0].source))
        assert "PRIVATE KEY" not in connection_file.read_text()
    assert not connection_file.exists()


def test_target_that_rejects_the_client_certificate_is_an_error(secured: Rig, tmp_path: Path) -> None:
    stream = secured.make()
    secured.publish(stream, [Sent(b"x")])
    stranger = Authority(tmp_path / "stranger").certify("eve@example.net")
    entry = secured.add(stream, target_tls={"ca": secured.tls["ca"], **stranger})
    assert "the server refuses our certificate" in secured.failure()
    entry["target_tls"] = {"ca": stranger["cert"]}
    assert "set the CA's file in tls: ca" in secured.failure()
    del entry["target_tls"]
    secured.drain()
    assert len(secured.copies(stream)) == 1


@pytest.mark.process
def test_check_connect_works_with_credentials_over_tls(
    authority: Authority,
    tmp_path: Path,
    unique: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    operator, user = Operator(), new_key()
    (tmp_path / "me.creds").write_text(creds(operator.user_jwt(user), user.seed))
    block = authority.block(**authority.certify("localhost"), verify=True, handshake_first=True)
    with NatsServer(tmp_path / "server", "server", config=block + operator.config) as server:
        url = f"localhost:{server.port}?credentials={tmp_path}/me.creds&tls_handshake_first=true"
        stream, tls = unique("CHECKED"), {"ca": str(authority.file), **authority.certify("me@example.net")}
        entry = {"stream": stream, "source_url": url, "target_url": url, "target_stream": f"{stream}_COPY"}
        document: dict[str, Any] = {"name": "EAST", "state_store": str(tmp_path), "tls": tls}
        document["streams"] = [{**entry, "filter_subject": f"{stream}.>", "target_subject_prefix": "copy"}]
        file = tmp_path / "replication.yaml"
        monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
        file.write_text(yaml.safe_dump(document))
        with Cluster(load_settings(file, {}).streams[0].source) as cluster:
            cluster.create_stream({"name": stream, "subjects": [f"{stream}.>"], "allow_direct": True})
        assert run_command(("check", "--connect")) == 0
        assert "failed" not in capsys.readouterr().out
        (tmp_path / "me.creds").write_text(creds(operator.user_jwt(user), new_key().seed))
        assert run_command(("check", "--connect")) == 1
        captured = capsys.readouterr()
        assert "uthorization" in captured.err
        assert user.seed not in captured.out + captured.err


@pytest.mark.nightly
@pytest.mark.process
def test_choria_site_runs_without_leaking_its_secrets(
    authority: Authority, tmp_path: Path, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Search its logs, processes, files and Spark plans after `check --connect` and `run --once`."""
    nodes, issuer, home = [f"web{n}" for n in range(10)], Issuer(tmp_path / "issuer"), tmp_path / "home"
    stream, events = unique("REG"), tmp_path / "events"
    events.mkdir()
    with broker(tmp_path / "broker", authority, issuer) as running:
        url = f"nats://localhost:{running.server.port}"
        entry = {"stream": stream, "source_url": url, "target_url": url, "target_stream": f"{stream}_COPY"}
        entry |= {"target_subject_prefix": "copy", "inspect_field": "sender", "inspect_duration": "1h"}
        file = tmp_path / "replication.yaml"
        top = {"name": "EAST", "state_store": str(home), "choria": issuer.block("sr")}
        top["tls"] = {"ca": str(authority.file)}
        logged = {"enabled": True, "dir": events.as_uri(), "compress": False}
        config = {f"spark.eventLog.{key}": value for key, value in logged.items()}
        spark = {"from_messages": 0, "config": config}
        file.write_text(yaml.safe_dump({**top, "spark": spark, "streams": [entry]}))
        monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
        for name in ("SR_ASSETS_HOME", "DAGSTER_HOME"):
            monkeypatch.delenv(name, raising=False)
        with Cluster(load_settings(file, {}).streams[0].source) as opened:
            opened.create_stream({"name": stream, "subjects": [f"{stream}.>"], "allow_direct": True})
            opened.publish_many([(f"{stream}.{node}", b'{"sender":"%b"}' % node.encode(), node) for node in nodes])
        output, ended = [], threading.Event()

        def watch() -> None:
            while not ended.wait(0.5):
                for process in psutil.process_iter(["cmdline"]):
                    output.append(repr(process.info))

        try:
            with in_background(watch):
                try:
                    for arguments in (("check", "--connect"), ("run", "--once")):
                        completed = run_forked([sys.executable, "-m", "sr_assets", *arguments])
                        output += [completed.stdout, completed.stderr]
                        assert completed.returncode == 0, completed.stderr
                finally:
                    ended.set()
        finally:
            stop_engine(home.resolve())
        with Cluster(load_settings(file, {}).streams[0].target) as opened:
            assert opened.stream_info(f"{stream}_COPY").messages == len(nodes)
    assert files_with(str(home.resolve()), events), "Spark's plans do not name the connection files"
    for secret in issuer.secrets:
        assert not any(secret in text for text in output)
        assert files_with(secret, home, events) == []
