"""What every installed program must do: replicate, answer health checks, report to systemd, and stop in time."""

import contextlib
import socket
import time
from pathlib import Path
from urllib.request import urlopen

import psutil
import yaml

from sr_assets.embedded.nats_server import free_port
from sr_assets_tests.packages.chroot import Service, notifications
from sr_assets_tests.rig import Rig, Sent, wait_until

CONFIG = "/etc/sr-assets/replication.yaml"
_START_SECONDS, _STOP_SECONDS = 600.0, 30.0
_MESSAGES = 50


def assert_replicates(service: Service, rig: Rig, log: Path, source_url: str, **keys: str) -> None:
    """Configure one stream, run the program until everything is copied and reported, and stop it.

    `source_url` may contain a variable of the program's environment; `keys` are added to the configuration.
    """
    stream, port = rig.make("FLEET"), free_port()
    rig.publish(stream, [Sent(b"%d" % n) for n in range(_MESSAGES)])
    entry = {"stream": stream, "source_url": source_url, "target_url": rig.target.url}
    config = {"name": "BARE", "metrics": {"port": port}, "sensor": {"interval": "5s"}, "streams": [entry]}
    # Every batch starts the packaged Java.
    service.chroot.path(CONFIG).write_text(yaml.safe_dump({**config, **keys, "spark": {"from_messages": 0}}))
    service.environ["NOTIFY_SOCKET"] = "/run/notify"
    with notifications(service.chroot.path("/run/notify")) as receiver, service.started(log) as process:
        receiver.setblocking(False)
        received: set[bytes] = set()
        _await_report(b"READY=1", receiver, received, process)
        assert process.uids().effective != 0
        wait_until(lambda: _copies(rig, stream) == _MESSAGES, "the copies", _START_SECONDS)
        wait_until(lambda: _status(port, "readyz") == 200, "/readyz", _START_SECONDS)
        wait_until(lambda: _status(port, "healthz") == 200, "/healthz", _START_SECONDS)
        _stop(process)
        _read_reports(receiver, received)
        assert received == {b"READY=1", b"WATCHDOG=1", b"STOPPING=1"}
    # After its interruption, Dagster's daemon may report that a sensor no longer finds the code server.
    running, _, _ = log.read_text().partition("Received interrupt, shutting down daemon threads")
    assert "Traceback" not in running


def _await_report(report: bytes, receiver: socket.socket, received: set[bytes], process: psutil.Process) -> None:
    def arrived() -> bool:
        _read_reports(receiver, received)
        assert process.is_running(), "the program ended"
        return report in received

    wait_until(arrived, report.decode(), _START_SECONDS)


def _read_reports(receiver: socket.socket, received: set[bytes]) -> None:
    with contextlib.suppress(BlockingIOError):
        while True:
            received.add(receiver.recv(100))


def _copies(rig: Rig, stream: str) -> int:
    info = rig.api(f"STREAM.INFO.{stream}", server=rig.target)
    return int(info.get("state", {}).get("messages", 0))


def _stop(process: psutil.Process) -> None:
    """Stop a program as systemd does; it must end by itself before systemd would kill it."""
    started = time.monotonic()
    process.terminate()
    process.wait(_STOP_SECONDS)
    assert time.monotonic() - started < _STOP_SECONDS


def _status(port: int, path: str) -> int:
    try:
        with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as response:
            return int(response.status)
    except OSError as error:
        return int(getattr(error, "code", 0))
