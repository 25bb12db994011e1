"""The tutorials, command by command, in a new folder with the programs of an installation.

Kinds of blocks: `console` (commands, and lines of their output), `console terminal` (a program that keeps its terminal, and
the output that says that it is ready), `python tutorial` (cells of one notebook), `python file NAME` and `yaml file NAME` (a
file to save). A comment `<!-- stop: TEXT -->` ends the terminal whose command contains the text.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sr_assets_tests.rig import PATIENCE_SECONDS, wait_until
from sr_assets_tests.servers import free_port

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "tutorials"
_STEP = re.compile(r"^<!-- stop: (?P<stop>.+) -->$|^```(?P<kind>[^\n]+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_DONE = "<command ended>"
#: An installation is made by the tests' own environment.
_SKIPPED = ("make ", "pip install ")


class Shell:
    """One bash process, as a reader's terminal: directory and variables last from command to command."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self._folder, self._terminals = folder, dict[str, tuple[int, Path]]()
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # Each background program is a process group of its own.
        self.run("set -m")

    def run(self, command: str) -> tuple[int, str]:
        """Run a command; return its exit code and its output."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.write(f"{command}\necho '{_DONE}' $?\n")
        self._bash.stdin.flush()
        lines: list[str] = []
        for line in self._bash.stdout:
            if line.startswith(_DONE):
                return int(line.removeprefix(_DONE)), "".join(lines)
            lines.append(line)
        raise AssertionError(f"{command}: bash ended: {lines}")

    def start(self, command: str, ready: str) -> None:
        """Start a program that keeps its terminal, and wait until its output contains a text."""
        output = self._folder / f"terminal-{len(self._terminals)}"
        output.touch()
        _, printed = self.run(f"{command} >{output} 2>&1 & echo pid $!")
        pid = int(re.search(r"pid (\d+)", printed)[1])  # type: ignore[index]
        self._terminals[command] = pid, output
        wait_until(lambda: ready in output.read_text(), f"{ready!r} of {command}", 2 * PATIENCE_SECONDS, every=0.1)

    def stop(self, text: str) -> None:
        """End the program whose command contains a text, as Ctrl-C does, and wait for its end."""
        (command,) = (command for command in self._terminals if text in command)
        pid, _ = self._terminals.pop(command)
        os.killpg(pid, signal.SIGINT)
        self.run(f"wait {pid}")

    def close(self) -> None:
        """End all programs, the last one first, and the shell."""
        for command in reversed(list(self._terminals)):
            self.stop(command)
        with self._bash:  # closes its input, which ends it, and waits
            pass


@contextmanager
def reader(folder: Path) -> Iterator[Shell]:
    """A reader in a clone: the examples, and the programs of an installation in `.venv`."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / ".venv").symlink_to(Path(sys.prefix))
    # An activated environment, telemetry off.
    environ = {
        "HOME": str(folder),
        "PATH": "/usr/bin:/bin",
        "VIRTUAL_ENV": sys.prefix,
        "DAGSTER_DISABLE_TELEMETRY": "1",
    }
    shell = Shell(folder, environ)
    try:
        yield shell
    finally:
        shell.close()


def follow(shell: Shell, folder: Path, text: str) -> None:
    """Do all steps of a tutorial; a command whose sample output is missing is repeated, as a reader would."""
    cells: dict[str, object] = {}
    for step in _STEP.finditer(text):
        if step["stop"]:
            shell.stop(step["stop"])
            continue
        kind, _, name = step["kind"].partition(" file ")
        if name:
            _, cwd = shell.run("pwd")
            (Path(cwd.strip()) / name).write_text(step["text"])
        elif kind == "python tutorial":
            with contextlib.chdir(folder):
                exec(compile(step["text"], "tutorial", "exec"), cells)
        elif kind in ("console", "console terminal"):
            for line, *sample in _commands(step["text"]):
                if line.startswith(_SKIPPED):
                    continue
                if kind == "console terminal":
                    shell.start(line, " ".join(sample))
                else:
                    do(shell, line, sample)


def _commands(text: str) -> list[list[str]]:
    """Return each command of a block with the lines of its output."""
    return [part.rstrip().splitlines() for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]]


def do(shell: Shell, line: str, sample: list[str]) -> None:
    """Run a command until its output has the words of the sample's first line and the first words of others, but no numbers."""
    fails = any(each.startswith("error:") for each in sample)
    words = [*(sample[0].split() if sample else ()), *(each.split()[0] for each in sample[1:])]
    words = [word for word in words if not re.search(r"\d", word)]
    printed: list[str] = []

    def is_done() -> bool:
        code, output = shell.run(line)
        printed.append(output)
        assert (code != 0) == fails or sample, f"{line}: exit code {code}\n{output}"
        return (code != 0) == fails and all(word in output for word in words)

    try:
        wait_until(is_done, f"{words} of {line}", PATIENCE_SECONDS, every=1)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{printed[-1]}") from None


def tutorial(name: str, **replaced: str) -> str:
    """Return a tutorial's text with free ports."""
    text = (FOLDER / name).read_text()
    for old in ("4222", "4223", "3000"):
        text = re.sub(rf"(?<=[: ]){old}\b", replaced.setdefault(old, str(free_port())), text)
    text = text.replace("sr-assets up\n", f"sr-assets up --port {replaced['3000']}\n")
    text = text.replace("sr-assets demo ", f"sr-assets demo --port {replaced['3000']} --nodes 40 ")
    return text.replace("dg dev ", f"dg dev --port {replaced['3000']} ")


def part(text: str, heading: str) -> str:
    """Return a section of a tutorial."""
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.timeout(600)
def test_stream_replicator_is_replaced(tmp_path: Path) -> None:
    text = tutorial("replace.md").replace("warn_duration: 1m", "warn_duration: 6s")
    text = text.replace("--interval 10s", "--interval 2s")
    with reader(tmp_path) as shell:
        follow(shell, tmp_path, text)


@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.timeout(900)
def test_fleet_is_watched_and_read_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("SR_ASSETS_CONFIG", "")  # restored after the notebook has set it
    with reader(tmp_path) as shell:
        follow(shell, tmp_path, tutorial("watch.md"))
        follow(shell, tmp_path, tutorial("notebook.md"))
    assert "<svg" in (tmp_path / "advisories.svg").read_text()


@pytest.mark.nightly
@pytest.mark.process
@pytest.mark.timeout(900)
def test_platform_is_added_to_a_dagster_project(tmp_path: Path) -> None:
    ports = {port: str(free_port()) for port in ("4222", "4223", "3000")}
    replace = tutorial("replace.md", **ports)
    with reader(tmp_path) as shell:
        follow(shell, tmp_path, replace.partition("\n## ")[0] + part(replace, "1. A fleet to try it on"))
        follow(shell, tmp_path, tutorial("dagster.md", **ports))
