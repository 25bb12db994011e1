"""`--watch` on a real terminal, in a pipe, and where it makes no sense; and that every table fits the window."""

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

from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.settings import parse_cluster
from sr_assets_tests.rig import PATIENCE_SECONDS, Command
from sr_assets_tests.test_cli import configuration, in_a_window, node_row, publish, write_configuration

_ALTERNATE = ("\x1b[?1049h", "\x1b[?1049l")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configured home in which one node is published."""
    home = tmp_path / "home"
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(write_configuration(tmp_path, configuration(home))))
    for name in ("SR_ASSETS_HOME", "COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    publish(home, [node_row("web1.example.net", "up", 0)], [])
    return home


class Terminal:
    """A command on a terminal of so many lines and columns."""

    def __init__(self, lines: int, columns: int, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        command = [sys.executable, "-m", "sr_assets", *arguments]
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
        )
        os.close(theirs)
        self.shown = ""

    def await_text(self, text: str) -> None:
        """Read on until a text is shown that was not before."""
        seen, deadline = len(self.shown), time.monotonic() + PATIENCE_SECONDS
        while text not in self.shown[seen:]:
            assert select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))[0], self.shown
            self.shown += os.read(self._ours, 65536).decode()

    def end(self, number: signal.Signals) -> int:
        """Send a signal; returns the exit code."""
        self._process.send_signal(number)
        with contextlib.suppress(OSError):
            while part := os.read(self._ours, 65536):
                self.shown += part.decode()
        return self._process.wait(PATIENCE_SECONDS)

    def close(self) -> None:
        """Be gone, whatever has become of the command."""
        self._process.kill()
        self._process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Return a function that runs a command on a terminal, of lines and columns, until the end of the test."""
    with contextlib.ExitStack() as stack:

        def start(lines: int, columns: int, *arguments: str) -> Terminal:
            started = Terminal(lines, columns, *arguments)
            stack.callback(started.close)
            return started

        yield start


@pytest.mark.process
def test_a_watched_table_is_replaced_until_an_interrupt_which_is_no_error(
    home: Path, terminal: Callable[..., Terminal]
) -> None:
    window = terminal(8, 60, "nodes", "--watch", "0.1")
    window.await_text("web1.example.net")
    publish(home, [node_row(f"db{number}.example.net", "timeout", 0) for number in range(20)], [])
    window.await_text("db0.example.net")
    window.await_text("lines more")
    assert window.end(signal.SIGINT) == 0
    shown, _, last = window.shown.partition(_ALTERNATE[1])
    assert shown.startswith(_ALTERNATE[0])
    assert "Traceback" not in window.shown
    # The terminal has its cursor again, and what was shown last, whole.
    assert last.count("db") == 20
    assert last.index("\x1b[?25h") < last.index("db")


@pytest.mark.process
def test_a_watched_table_in_a_pipe_comes_again_and_again_without_colours(home: Path) -> None:
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


def test_what_cannot_be_watched_is_refused_in_one_line(home: Path, command: Command) -> None:
    for arguments, reason in (
        (("nodes", "--watch", "--format", "json"), "--watch shows tables, not json"),
        (("lag", "--watch", "5s", "--format", "csv"), "--watch shows tables, not csv"),
        (("advisories", "--watch", "--follow"), "--follow"),
        (("report", "--watch", "0"), "at least 0.1 s"),
        (("summary", "--watch", "soon"), "soon"),
        (("summary", "--watch"), "no feed is configured"),
    ):
        code, out, error = command(*arguments)
        assert (code, out) == (2, ""), arguments
        assert reason in error
        assert error.count("\n") == 1


@pytest.mark.process
def test_what_servers_are_asked_fits_the_window_too(
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
