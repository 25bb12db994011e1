"""A whole Choria site by `check --connect` and `run --once` on Spark, and a search for its secrets in everything it
leaves.
"""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.spark.engine import stop_engine
from sr_assets.settings import load_settings
from sr_assets_tests.choria_broker import Issuer, broker
from sr_assets_tests.secured import Authority

NODES = [f"web{n}" for n in range(10)]


@pytest.mark.process
def test_choria_site_runs_without_leaking_its_secrets(
    tmp_path: Path, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, issuer, home = Authority(tmp_path / "ca"), Issuer(tmp_path / "issuer"), tmp_path / "home"
    stream, events = unique("REG"), tmp_path / "events"
    events.mkdir()
    with broker(tmp_path / "broker", authority, issuer) as running:
        url = f"nats://localhost:{running.server.port}"
        entry = {"stream": stream, "source_url": url, "target_url": url, "target_stream": f"{stream}_COPY"}
        entry |= {"target_subject_prefix": "copy", "inspect_field": "sender", "inspect_duration": "1h"}
        file = tmp_path / "replication.yaml"
        top = {
            "name": "EAST",
            "state_store": str(home),
            "tls": {"ca": str(authority.file)},
            "choria": issuer.block("sr"),
        }
        logged = {"enabled": True, "dir": events.as_uri(), "compress": False}
        config = {f"spark.eventLog.{key}": value for key, value in logged.items()}
        spark = {"from_messages": 0, "config": config}
        file.write_text(yaml.safe_dump({**top, "spark": spark, "streams": [entry]}))
        monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
        for name in ("SR_ASSETS_HOME", "DAGSTER_HOME"):
            monkeypatch.delenv(name, raising=False)
        with Cluster(load_settings(file, {}).streams[0].source) as opened:
            opened.create_stream({"name": stream, "subjects": [f"{stream}.>"], "allow_direct": True})
            opened.publish_many([(f"{stream}.{node}", b'{"sender":"%b"}' % node.encode(), node) for node in NODES])
        output, ended = [], threading.Event()

        def watch() -> None:
            while not ended.wait(0.5):
                for process in psutil.process_iter(["cmdline"]):
                    output.append(repr(process.info))

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            for arguments in (("check", "--connect"), ("run", "--once")):
                completed = subprocess.run(
                    [sys.executable, "-m", "sr_assets", *arguments], capture_output=True, text=True, check=False
                )
                output += [completed.stdout, completed.stderr]
                assert completed.returncode == 0, completed.stderr
        finally:
            ended.set()
            watching.join()
            stop_engine(home.resolve())
        with Cluster(load_settings(file, {}).streams[0].target) as opened:
            assert opened.stream_info(f"{stream}_COPY").messages == len(NODES)
    files = [path for folder in (home, events) for path in folder.rglob("*") if path.is_file()]
    plans = b"".join(path.read_bytes() for path in files if events in path.parents)
    assert str(home.resolve()).encode() in plans, "Spark's plans do not name the connection files"
    for secret in issuer.secrets:
        assert not any(secret in text for text in output)
        assert not [path for path in files if secret.encode() in path.read_bytes()]
