"""The progress of long commands: bars on a real terminal, nothing in a pipe."""

import json
import signal
import sys
from pathlib import Path

import pytest

from sr_assets.adapters.state.lock import SiteLock
from sr_assets.adapters.state.store import SiteState
from sr_assets_tests.forks import run_forked
from sr_assets_tests.rig import SITE, Rig, Sent
from sr_assets_tests.terminal import Terminal

pytestmark = pytest.mark.process

_HIDDEN, _SHOWN, _ERASED = "\x1b[?25l", "\x1b[?25h", "\x1b[2K"
_NODES = [Sent(json.dumps({"sender": f"web{number}"}).encode()) for number in range(20)]
#: The arguments of each command, and the texts of its bars.
COMMANDS = {
    "check": ("check --connect --format json", ("testing links:", "0/5", f"checkpoints of {SITE}", "4/5")),
    "export": ("export {out}/copy", ("exporting tables", "0/28", "topology_drift", "27/28")),
    "export-files": ("export {out}/copy --format parquet", ("comparing tables", "exporting files", "/rows.parquet")),
    "replay": ("replay --stream {stream} --format json", (f"{SITE}/{{stream}}: replaying", "20/20")),
    "checkpoint": ("checkpoint", (f"{SITE}: writing tables of the checkpoint", f"storing bytes of {SITE}/{SITE}")),
    "restore": ("restore", (f"reading bytes of {SITE}/{SITE}", f"{SITE}: restoring tables of the checkpoint")),
    "forget": ("forget --site PARIS", ("deleting rows of streams", "publishing the tables", "deleting 0 files")),
    "measure": (
        "measure catch-up --nodes 3 --interval 5m --backlog 5m --out {out}/results",
        ("publishing the backlog of 3 nodes", "draining 3 messages, items found:"),
    ),
}


@pytest.fixture
def stream(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> str:
    """A stream of 20 nodes that was copied, with a stored checkpoint."""
    name = rig.make()
    tracked = {"inspect_field": "sender", "inspect_duration": "1h"}
    rig.add(name, target_stream=rig.unique("T"), target_subject_prefix=rig.unique("copy"), **tracked)
    rig.publish(name, _NODES)
    rig.drain(checkpoint={"interval": "1s", "bucket": rig.unique("STATE"), "key": "x" * 40})
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(rig.home / "replication.yaml"))
    for variable in ("SR_ASSETS_HOME", "COLUMNS", "NO_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    return name


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.nightly if name == "measure" else ()) for name in COMMANDS],
)
def test_command_shows_bars_on_a_terminal_alone(name: str, rig: Rig, stream: str, tmp_path: Path) -> None:
    line, texts = COMMANDS[name]

    def arguments(out: str) -> list[str]:
        (tmp_path / out).mkdir()
        if name == "forget":
            with SiteState(rig.home / "sites" / "PARIS") as state, state.transaction():
                state.connection.execute("INSERT INTO streams (stream, created_ns, next_sequence) VALUES ('OLD', 1, 5)")
        return line.format(out=tmp_path / out, stream=stream).split()

    terminal = Terminal(*arguments("terminal"), piped=True)
    code, output = terminal.end()
    assert code == 0, terminal.shown
    assert [text for text in texts if text.format(stream=stream) not in terminal.shown] == [], terminal.shown
    # The bars vanish, and the cursor is visible again.
    assert terminal.shown.rpartition(_ERASED)[2] == f"{_SHOWN}\r"
    assert "json" not in line or json.loads(output)
    piped = run_forked([sys.executable, "-m", "sr_assets", *arguments("pipe")])
    assert (piped.returncode, piped.stderr) == (0, "")


def test_json_on_the_same_terminal_follows_the_bars(stream: str) -> None:
    terminal = Terminal("check", "--connect", "--format", "json")
    assert terminal.end()[0] == 0
    assert json.loads(terminal.shown.rpartition(_ERASED)[2].removeprefix(_SHOWN))


def test_dumb_terminal_gets_no_bar(stream: str) -> None:
    terminal = Terminal("check", "--connect", term="dumb", piped=True)
    assert terminal.end()[0] == 0
    assert not terminal.shown


@pytest.mark.parametrize(
    ("number", "code", "end"), ((signal.SIGINT, 130, "interrupted\r\n"), (signal.SIGTERM, -signal.SIGTERM, _SHOWN))
)
def test_signal_shows_the_cursor_again(rig: Rig, stream: str, number: signal.Signals, code: int, end: str) -> None:
    folder = rig.home / "sites" / "PARIS"
    with SiteLock(folder, "test", 0.0):
        terminal = Terminal("forget", "--site", "PARIS", piped=True)
        assert "PARIS: waiting for test (pid" in terminal.read("waiting")
        terminal.process.send_signal(number)
        assert terminal.end()[0] == code
    assert terminal.shown.endswith(end)
    assert terminal.shown.rindex(_SHOWN) > terminal.shown.rindex(_HIDDEN)
