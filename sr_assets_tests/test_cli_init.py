"""`init`: a first configuration from options, answers or an old file, and the stream of its advisories."""

import os
import pty
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.security import NO_TLS
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.settings import load_settings
from sr_assets_tests.rig import Command, cluster
from sr_assets_tests.servers import free_port
from sr_assets_tests.terminal import Terminal

FILE = Path("conf/replication.yaml")
ADVISORIES = "CHORIA_ADVISORIES"


class Pair(NamedTuple):
    """A source with the stream NODES, and an empty target; `options` name both."""

    source: NatsServer
    target: NatsServer

    @property
    def options(self) -> tuple[str, ...]:
        return "--name", "LONDON", "--source", self.source.url, "--target", self.target.url


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Two new servers, and an empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SR_ASSETS_CONFIG", raising=False)
    with NatsServer(tmp_path / "a", "source") as source, NatsServer(tmp_path / "b", "target") as target:
        with cluster(source) as opened:
            add_stream(opened, "NODES", b'{"sender": "web1", "version": "1.2", "load": 3}')
        yield Pair(source, target)


def add_stream(opened: Cluster, stream: str, payload: bytes) -> None:
    """Create a stream with one message."""
    opened.create_stream({"name": stream, "subjects": [f"{stream}.>"], "allow_direct": True})
    opened.publish(f"{stream}.web1", payload, {})


@pytest.mark.process
def test_init_writes_a_configuration_that_runs(pair: Pair, command: Command) -> None:
    code, output, errors = command("init", "--yes", *pair.options)
    assert (code, errors) == (0, "")
    assert stat.S_IMODE(FILE.stat().st_mode) == 0o600
    (stream,) = load_settings().streams
    assert (stream.label, stream.target_stream) == ("LONDON/NODES", "NODES")
    assert stream.extractor is not None
    assert stream.extractor.text == "sender"
    with cluster(pair.source) as opened:
        made = opened.stream_info(ADVISORIES)
    assert made.subjects == ("choria.stream.advisories.*.>", "sr_assets.observer_alive.>")
    assert made.config["max_age"] == 90 * 86_400 * 10**9
    assert [line.split()[1] for line in output.partition("next:\n")[2].splitlines()] == ["check", "run", "up"]
    assert command("run", "--once")[0] == 0
    with cluster(pair.source) as opened:
        newest = opened.last_message(ADVISORIES, "choria.stream.advisories.>")
    assert newest is not None
    assert newest.subject == "choria.stream.advisories.new.web1"


@pytest.mark.process
def test_init_asks_for_what_no_option_gives(pair: Pair, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(pair.source) as opened:
        add_stream(opened, "OTHER", b"{}")
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "wb", buffering=0) as typing, os.fdopen(theirs) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        # Name and source, each first impossible; stream, sender, target; no stream of advisories.
        typing.write(f"A B\nLONDON\nhttp://x\n{pair.source.url}\nNODES\nversion\n{pair.target.url}\nn\n".encode())
        code, output, errors = command("init")
    assert code == 1, output
    assert "next:" not in output
    assert f"correct {FILE}, then run" in output
    assert "no stream takes choria.stream.advisories.new.sr-assets-check" in errors
    assert "OTHER: 1 messages of OTHER.>" in output
    assert "sender: web1" in output
    (entry,) = yaml.safe_load(FILE.read_text())["streams"]
    assert (entry["stream"], entry["inspect_field"]) == ("NODES", "version")
    with cluster(pair.source) as opened:
        assert not opened.stream_exists(ADVISORIES)


@pytest.mark.process
def test_init_asks_again_after_a_failed_connection(pair: Pair, tmp_path: Path) -> None:
    closed = f"127.0.0.1:{free_port()}"
    login = "authorization { user: nodes, password: secret }"
    with NatsServer(tmp_path / "c", "guarded", config=login) as guarded:
        wrong = f"nats://nodes:public@{guarded.address}"
        terminal = Terminal("init", "--name", "LONDON", "--source", f"nats://{closed}", asks=True)
        source, target = "URL of the source's server [nats://localhost:4222]: ", "URL of the target's server: "
        failures = [
            terminal.answer(source, f"{wrong}\n"),
            terminal.answer(source, f"tls://{pair.source.address}\n"),
            terminal.answer(source, f"{pair.target.url}\n"),
            terminal.answer(source, f"{pair.source.url}\n"),
        ]
        terminal.answer("names the sender", "\n")
        terminal.answer(target, f"nats://{closed}\n")
        failures.append(terminal.answer(target, f"{pair.target.url}\n"))
        terminal.answer("Create stream", "y\n")
        assert terminal.end()[0] == 0, terminal.shown
    expected = (
        f"error: cannot connect to NATS: {closed}: Connection refused",
        f"Error: cannot connect to NATS: {guarded.address}: Authorization Violation (correct the login in the URL)",
        f"Error: cannot connect to NATS: {pair.source.address}: {NO_TLS}",
        f"Error: {pair.target.address}: has no stream; create the stream into which the nodes publish",
        f"Error: cannot connect to NATS: {closed}: Connection refused",
    )
    for line, output in zip(expected, failures, strict=True):
        assert [line in shown for shown in output.splitlines()].count(True) == 1, output
    assert "Traceback" not in terminal.shown
    (stream,) = load_settings().streams
    assert (stream.source.label, stream.target.label) == (pair.source.address, pair.target.address)


@pytest.mark.process
@pytest.mark.parametrize("question", ("URL of the target's server", "Create stream"))
@pytest.mark.parametrize("key", ("c", "d"))
def test_init_interrupted_at_a_question_leaves_no_file(pair: Pair, question: str, key: str) -> None:
    options = pair.options[:-2] if question.startswith("URL") else pair.options
    terminal = Terminal("init", *options, "--sender", "sender", asks=True)
    if key == "d":
        terminal.answer(question, "\x04")
    else:
        terminal.interrupt(question)
    assert terminal.end()[0] == 130
    assert terminal.shown.endswith("\r\nerror: interrupted\r\n"), terminal.shown
    assert "Traceback" not in terminal.shown
    assert not FILE.exists()


@pytest.mark.process
def test_init_keeps_references_to_the_environment(
    pair: Pair, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TARGET_HOST", pair.target.url.removeprefix("nats://"))
    code, _, errors = command("init", "--yes", *pair.options[:-1], "nats://${TARGET_HOST}", "--sender", "-")
    assert (code, errors) == (0, "")
    (entry,) = yaml.safe_load(FILE.read_text())["streams"]
    assert entry["target_url"] == "nats://${TARGET_HOST}"
    assert "inspect_field" not in entry
    with cluster(pair.source) as opened:
        assert not opened.stream_exists(ADVISORIES)


@pytest.mark.process
def test_init_does_not_guess_with_yes(pair: Pair, command: Command) -> None:
    with cluster(pair.source) as opened:
        add_stream(opened, "OTHER", b"no JSON")
    assert "choose one with --stream: NODES, OTHER" in command("init", "--yes", *pair.options)[2]
    assert "or copy every message with --sender -" in command("init", "--yes", *pair.options, "--stream", "OTHER")[2]
    assert command("init", "--yes", *pair.options, "--stream", "OTHERS")[0] == 1
    assert "--yes needs --target" in command("init", "--yes", *pair.options[:-2], "--stream", "NODES")[2]
    assert not FILE.parent.exists()


@pytest.mark.process
def test_init_leaves_no_file_that_is_invalid(pair: Pair, command: Command) -> None:
    code, output, errors = command("init", "--yes", *pair.options, "--sender", "a.#")
    assert code == 2
    assert "wrote" not in output
    assert errors.endswith("; nothing was written\n")
    assert not FILE.exists()


@pytest.mark.process
def test_init_takes_over_the_stream_replicators_file(pair: Pair, command: Command) -> None:
    old = Path("sr.yaml")
    old.write_text(
        f"name: LONDON  # a comment\nstreams:\n  - stream: NODES\n    source_url: {pair.source.url}\n"
        f"    target_url: {pair.target.url}\n    inspect_field: sender\n    inspect_duration: 1h\n    warn_duration: 10m\n"
        "    advisory: {subject: fleet.advisories.%s.%v, reliable: true}\n"
    )
    code, output, errors = command("init", "--from", "sr.yaml", "--yes")
    assert (code, errors) == (0, "")
    assert FILE.read_text().endswith(old.read_text())
    with cluster(pair.source) as opened:
        made = opened.stream_info(ADVISORIES)
    assert made.subjects == ("fleet.advisories.*.>", "sr_assets.observer_alive.>")
    assert "recover --stream LONDON/NODES" in output


@pytest.mark.process
def test_init_converts_a_file_with_topics(pair: Pair, command: Command) -> None:
    topics = {
        "nodes": {"topic": "NODES.>", "name": "LONDON", "source_url": pair.source.url, "target_url": pair.target.url},
        "lost": {"topic": "lost.>", "source_url": pair.source.url, "target_url": pair.target.url},
    }
    Path("sr.yaml").write_text(yaml.safe_dump({"topics": topics}))
    code, _, errors = command("init", "--from", "sr.yaml", "--name", "LONDON")
    assert code == 2, "without a terminal"
    code, _, errors = command("init", "--from", "sr.yaml", "--name", "LONDON", "--yes")
    assert code == 2
    assert "which stream of the source takes lost.>?" in errors
    assert "has open questions; answer them, then run `sr-assets check --connect`" in errors
    FILE.unlink()
    del topics["lost"]
    Path("sr.yaml").write_text(yaml.safe_dump({"topics": topics}))
    code, _, errors = command("init", "--from", "sr.yaml", "--name", "LONDON", "--yes")
    assert (code, errors) == (0, "")
    assert [stream.stream for stream in load_settings().streams] == ["NODES"]


def test_init_refuses(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SR_ASSETS_CONFIG", raising=False)
    assert "init asks questions; run it on a terminal" in command("init")[2]
    (tmp_path / "sr.yaml").write_text("name: X\nstreams:\n  - stream: S\n    wrokers: 3\n")
    for arguments, message in (
        (("--from", "sr.yaml"), "wrokers"),
        (("--from", "sr.yaml", "--name", "Y"), "has its own"),
        (("--from", "sr.yaml", "--stream", "S"), "omit the other options"),
        (("--name", "A B", "--target", "nats://localhost"), "--name: "),
        (("--source", "http://example.net", "--target", "nats://localhost"), "--source: the URL must begin with"),
    ):
        code, _, errors = command("init", "--yes", *arguments)
        assert (code, errors.count("\n")) == (2, 1), errors
        assert message in errors
    assert not FILE.parent.exists()
    FILE.parent.mkdir()
    FILE.write_text("name: X\n")
    assert "already exists" in command("init", "--yes")[2]
    assert FILE.read_text() == "name: X\n"
