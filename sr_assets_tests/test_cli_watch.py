"""`--watch` on a real terminal, in a pipe, and with unsupported options; every table fits the window."""

import codecs
import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.settings import parse_cluster
from sr_assets_tests.rig import PATIENCE_SECONDS, Command
from sr_assets_tests.test_cli import configuration, in_a_window, node_row, publish, write_configuration

_ALTERNATE = ("\x1b[?1049h", "\x1b[?1049l")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configured home with one published node."""
    home = tmp_path / "home"
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(write_configuration(tmp_path, configuration(home))))
    for name in ("SR_ASSETS_HOME", "COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    publish(home, [node_row("web1.example.net", "up", 0)], [])
    return home


class Terminal:
    """A command on a terminal of the given size."""

    def __init__(self, lines: int, columns: int, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        command = [sys.executable, "-m", "sr_assets", *arguments]
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
        )
        os.close(theirs)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.shown = ""

    def await_text(self, text: str) -> None:
        """Read until new output contains a text."""
        seen, deadline = len(self.shown), time.monotonic() + PATIENCE_SECONDS
        while text not in self.shown[seen:]:
            assert select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))[0], self.shown
            self.shown += self._decoder.decode(os.read(self._ours, 65536))

    def end(self, number: signal.Signals) -> int:
        """Send a signal and return the exit code."""
        self._process.send_signal(number)
        with contextlib.suppress(OSError):
            while part := os.read(self._ours, 65536):
                self.shown += self._decoder.decode(part)
        return self._process.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        """Kill the command if it still runs."""
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Return a function that runs a command on a terminal until the end of the test."""
    with contextlib.ExitStack() as stack:

        def start(lines: int, columns: int, *arguments: str) -> Terminal:
            started = Terminal(lines, columns, *arguments)
            stack.callback(started.close)
            return started

        yield start


@pytest.mark.process
def test_watch_replaces_table_until_interrupt(home: Path, terminal: Callable[..., Terminal]) -> None:
    window = terminal(8, 60, "nodes", "--watch", "0.1")
    window.await_text("web1.example.net")
    publish(home, [node_row(f"db{number}.example.net", "timeout", 0) for number in range(20)], [])
    window.await_text("db0.example.net")
    window.await_text("more lines")
    assert window.end(signal.SIGINT) == 0
    shown, _, last = window.shown.partition(_ALTERNATE[1])
    assert shown.startswith(_ALTERNATE[0])
    assert "Traceback" not in window.shown
    # The terminal shows its cursor and the complete last output.
    assert last.count("db") == 20
    assert last.index("\x1b[?25h") < last.index("db")


@pytest.mark.process
def test_watch_appends_plain_tables_in_pipe(home: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "sr_assets", "nodes", "--watch", "0.1"], stdout=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        lines = iter(watching.stdout.readline, "")
        tables = [next(line for line in lines if "web1.example.net" in line) for _ in range(3)]
        watching.send_signal(signal.SIGTERM)
        rest = watching.stdout.read()
    assert watching.returncode == 0
    assert "\x1b" not in "".join((*tables, rest))


def test_watch_refuses_unsupported_options(home: Path, command: Command) -> None:
    for arguments, reason in (
        (("nodes", "--watch", "--format", "json"), "--watch prints tables, not json"),
        (("lag", "--watch", "5s", "--format", "csv"), "--watch prints tables, not csv"),
        (("advisories", "--watch", "--follow"), "--follow"),
        (("report", "--watch", "0"), "the minimum is 0.1 s"),
        (("summary", "--watch", "soon"), "soon"),
        (("summary", "--watch"), "no feed is configured"),
    ):
        code, out, error = command(*arguments)
        assert (code, out) == (2, ""), arguments
        assert reason in error
        assert error.count("\n") == 1


@pytest.mark.process
def test_lag_and_report_fit_the_window(
    nats_server: NatsServer, unique: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = unique("STREAM_WITH_A_RATHER_LONG_NAME")
    entry = {
        "stream": stream,
        "source_url": nats_server.url,
        "target_url": nats_server.url,
        "target_stream": f"{stream}_COPY",
        "target_subject_prefix": "copy",
    }
    file = write_configuration(
        tmp_path, yaml.safe_dump({"name": "EAST", "state_store": str(tmp_path), "streams": [entry]})
    )
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
    with Cluster(parse_cluster(nats_server.url)) as cluster:
        cluster.create_stream({"name": stream, "subjects": [f"{stream}.>"]})
    for arguments in (("lag",), ("report",)):
        lines = in_a_window(40, *arguments, NO_COLOR="1")
        assert any("STREAM_" in line for line in lines)
        assert max(map(len, lines)) <= 40, lines
