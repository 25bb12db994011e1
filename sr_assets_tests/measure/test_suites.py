"""The suites `pipeline`, `silence` and `catch-up`: exact results, and refusals."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.state.lock import lock_owner
from sr_assets.adapters.wire import WireError
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.messages import Message
from sr_assets.measure import load
from sr_assets.measure.load import watch
from sr_assets.measure.measured_stream import MeasuredStream, choose_entry, default_load, default_subject
from sr_assets.measure.observation import Expectation
from sr_assets.settings import Settings, StreamSettings, load_settings, parse_cluster
from sr_assets_tests.forks import Forked
from sr_assets_tests.measure.test_measure import rows
from sr_assets_tests.rig import Command, in_background, wait_until
from sr_assets_tests.servers import NatsServer

SITE = "MEASURED"
SECOND_NS = 1_000_000_000
WARNING_SECONDS = 6
ENDS = ("copied", "advisory", "last seen", "queryable")
TRACKED = {"inspect_field": "sender", "inspect_duration": "1h", "warn_duration": f"{WARNING_SECONDS}s"}
ADVISED = {"advisory": {"subject": "ADVISED.%s.%v", "reliable": True}}
#: A run that lingers until it is killed.
RUN = f"""
from sr_assets.settings import load_settings
from sr_assets.stages.report import Stage
from sr_assets.stages.run import run_site
from sr_assets.stages.site import Site

with Site(load_settings(), {SITE!r}, owner="test", run_id="test") as site:
    run_site(site, {{"FLEET": frozenset(Stage)}}, drain_only=False)
"""


def configure(folder: Path, source_url: str, target_url: str, **keys: Any) -> Path:
    """Write a configuration with the stream FLEET, and return its file."""
    entry = {"stream": "FLEET", "source_url": source_url, "target_url": target_url, **keys}
    tree = {"name": SITE, "state_store": str(folder / "home"), "sensor": {"interval": "5s"}}
    file = folder / "replication.yaml"
    file.write_text(yaml.safe_dump({**tree, "linger": "10m", "run_budget": "1h", "streams": [entry]}))
    return file


def settings_of(folder: Path, **keys: Any) -> Settings:
    """Return the settings of a configuration whose servers do not exist."""
    return load_settings(configure(folder, "nats://127.0.0.1:1", "nats://127.0.0.1:2", **keys), {})


def entry_of(folder: Path, **keys: Any) -> StreamSettings:
    """Return the stream of `settings_of`."""
    return settings_of(folder, **keys).streams[0]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NatsServer, NatsServer]]:
    """A source with streams, and a target, which may be stopped."""
    folder = tmp_path_factory.mktemp("nats")
    with NatsServer(folder / "s", "source") as source, NatsServer(folder / "t", "target") as target:
        with Cluster(parse_cluster(source.url)) as admin:
            for stream in ("FLEET", "ADVISED"):
                admin.create_stream({"name": stream, "subjects": [f"{stream}.>"], "allow_direct": True})
        yield source, target


@pytest.fixture(scope="module")
def running(servers: tuple[NatsServer, NatsServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home with an active run of the site; yields the configuration."""
    folder = tmp_path_factory.mktemp("home").resolve()
    file = configure(folder, servers[0].url, servers[1].url, **TRACKED, **ADVISED)
    environ = {**os.environ, "SR_ASSETS_CONFIG": str(file)}
    with Forked([sys.executable, "-c", RUN], env=environ) as child:
        wait_until(lambda: lock_owner(folder / "home" / "sites" / SITE) is not None, "the run")
        yield file
        child.kill()


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the homes of the configurations, and restore the variable that `--config` sets."""
    monkeypatch.setenv("SR_ASSETS_CONFIG", "")
    for name in ("SR_ASSETS_HOME", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.process
@pytest.mark.nightly
def test_pipeline_finds_every_message_of_an_active_run(running: Path, command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--nodes", "7,10", "--interval", "500ms", "--out", str(out)]
    code, output, errors = command("--config", str(running), "measure", "pipeline", *options)
    assert (code, errors) == (0, "")
    assert output.startswith("7 nodes: 7 of 7, p50 ")
    _, *tests = rows(out / "requests.csv")
    items = [(nodes, end, str(3 * nodes if end == "last seen" else nodes)) for nodes in (7, 10) for end in ENDS]
    assert [row[:7] for row in tests] == [
        [str(number), f"stored → {end}", str(nodes), count, count, "0", "0"]
        for number, (nodes, end, count) in enumerate(items, 1)
    ]
    for row, times in zip(tests, rows(out / "times.csv"), strict=True):
        assert list(map(float, row[7:])) == pytest.approx(np.percentile(list(map(int, times)), (50, 95, 100)) / 1e6)
    assert (out / "report.html").read_text().count("<svg") == len(ENDS)
    # No run was started.
    assert not (out / "run.log").exists()


@pytest.mark.process
def test_silence_finds_each_silent_node_and_no_other(running: Path, command: Command, tmp_path: Path) -> None:
    options = ["--nodes", "10", "--interval", "300ms", "--for", "300ms", "--out", str(tmp_path / "out")]
    code, _, errors = command("--config", str(running), "measure", "silence", *options)
    assert (code, errors) == (0, "")
    _, whole, after = rows(tmp_path / "out" / "requests.csv")
    assert [row[2:7] for row in (whole, after)] == [["10", "2", "2", "0", "0"]] * 2
    assert float(whole[7]) == pytest.approx(float(after[7]) + 1_000 * WARNING_SECONDS)


@pytest.mark.nightly
@pytest.mark.process
def test_stopped_target_is_refused(
    running: Path,
    servers: tuple[NatsServer, NatsServer],
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "_UNREACHABLE_SECONDS", 0.5)
    source, target = servers
    with Cluster(parse_cluster(source.url)) as admin:
        before = admin.stream_info("FLEET").last_sequence

    def stop_target() -> None:
        with Cluster(parse_cluster(source.url)) as watcher:
            wait_until(lambda: watcher.stream_info("FLEET").last_sequence > before, "the first message")
        os.kill(target.pid, signal.SIGSTOP)

    options = ["--nodes", "5", "--interval", "1s", "--for", "1h", "--out", str(tmp_path / "out")]
    try:
        with in_background(stop_target):
            code, output, errors = command("--config", str(running), "measure", "pipeline", *options)
    finally:
        os.kill(target.pid, signal.SIGCONT)
    assert (code, output, errors.count("\n")) == (1, "", 1)
    assert target.address in errors
    assert not {"times.csv", "report.html"} & {file.name for file in (tmp_path / "out").iterdir()}
    suite = json.loads((tmp_path / "out" / "suite.json").read_text())
    assert suite["partial"] is True


@pytest.mark.process
def test_interrupt_leaves_a_partial_result_and_one_line(
    running: Path, servers: tuple[NatsServer, NatsServer], tmp_path: Path
) -> None:
    out, target = tmp_path / "out", servers[1]
    options = ["--config", str(running), "measure", "pipeline", "--interval", "500ms", "--for", "1h"]
    environ = {**os.environ, "SR_ASSETS_CONFIG": ""}
    with (
        Cluster(parse_cluster(target.url)) as watcher,
        Forked(
            [sys.executable, "-W", "ignore", "-m", "sr_assets", *options, "--nodes", "6,7", "--out", str(out)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child,
    ):
        copied = watcher.stream_info("FLEET").messages if watcher.stream_exists("FLEET") else 0
        wait_until(
            lambda: watcher.stream_exists("FLEET") and watcher.stream_info("FLEET").messages >= copied + 6, "the copies"
        )
        child.send_signal(signal.SIGINT)
        output, errors = child.communicate()
    assert (child.returncode, output, errors) == (130, "", "error: interrupted\n")
    partial = {f"{name}.partial.csv" for name in ("requests", "times", "time_buckets")}
    assert {file.name for file in out.iterdir()} == {"suite.json", *partial}
    suite = json.loads((out / "suite.json").read_text())
    assert (suite["partial"], suite["reason"]) == (True, "interrupted")
    # The first number of nodes was measured, the second one did not begin.
    assert [row[2] for row in rows(out / "requests.partial.csv")[1:]] == ["6"] * len(ENDS)


@pytest.mark.long
@pytest.mark.process
def test_pipeline_starts_and_stops_a_run_of_its_own(
    servers: tuple[NatsServer, NatsServer], command: Command, tmp_path: Path
) -> None:
    with Cluster(parse_cluster(servers[0].url)) as admin:
        admin.create_stream({"name": "OWN", "subjects": ["OWN.*"], "allow_direct": True})
    file = configure(tmp_path, servers[0].url, servers[1].url, **TRACKED, **ADVISED, stream="OWN")
    out = tmp_path / "out"
    options = ["--nodes", "6", "--interval", "1s", "--for", "3s", "--out", str(out)]
    code, _, errors = command("--config", str(file), "measure", "pipeline", *options)
    assert (code, errors) == (0, "")
    assert [row[1:5] for row in rows(out / "requests.csv")[1:]] == [
        [f"stored → {end}", "6", count, count] for end in ENDS for count in ("18" if end == "last seen" else "6",)
    ]
    assert (out / "run.log").exists()
    assert lock_owner(tmp_path / "home" / "sites" / SITE) is None


@pytest.mark.nightly
@pytest.mark.process
def test_catch_up_drains_a_backlog_in_a_run_of_its_own(
    servers: tuple[NatsServer, NatsServer], command: Command, tmp_path: Path
) -> None:
    with Cluster(parse_cluster(servers[0].url)) as admin:
        admin.create_stream({"name": "BACKLOG", "subjects": ["BACKLOG.*"], "allow_direct": True})
    file = configure(tmp_path, servers[0].url, servers[1].url, **TRACKED, **ADVISED, stream="BACKLOG")
    out = tmp_path / "out"
    options = ["--nodes", "20", "--backlog", "1h", "--out", str(out)]
    code, output, errors = command("--config", str(file), "measure", "catch-up", *options)
    assert (code, errors) == (0, "")
    assert output.splitlines()[-1].startswith("20 nodes: 240 messages in ")
    _, *tests = rows(out / "requests.csv")
    counts = {end: "240" if end == "last seen" else "20" for end in ENDS}
    assert [row[1:5] for row in tests] == [[f"start → {end}", "20", count, count] for end, count in counts.items()]
    assert json.loads((out / "suite.json").read_text())["backlog_messages"] == [240]


def sent(sequence: int, node: str, seconds: float, size: int = 100) -> Message:
    """Return a message of a node in the source."""
    return Message(sequence, int(seconds * SECOND_NS), f"FLEET.{node}", b"", b"", size)


def test_expectation_copies_by_the_rules(tmp_path: Path) -> None:
    expectation = Expectation(
        entry_of(tmp_path, **{**TRACKED, "inspect_duration": "10s"}, size_trigger=50), {"FLEET.a": "a", "FLEET.b": "b"}
    )
    for message in (sent(1, "a", 1), sent(2, "b", 1), sent(3, "a", 2), sent(4, "other", 2), sent(5, "b", 3, 200)):
        expectation.add(message)
    expectation.add(sent(6, "a", 11))
    assert expectation.due == {1, 2, 5, 6}
    assert expectation.sequences == {"a": [1, 3, 6], "b": [2, 5]}


def test_expectation_copies_everything_without_sampling(tmp_path: Path) -> None:
    expectation = Expectation(entry_of(tmp_path), {"FLEET.a": "a"})
    for message in (sent(1, "a", 1), sent(2, "a", 2), sent(3, "other", 2)):
        expectation.add(message)
    assert expectation.due == {1, 2}


@pytest.mark.parametrize(("at_seconds", "is_false"), ((7.5, False), (8.5, True), (14.5, False)))
def test_timeout_is_false_if_the_node_reported(tmp_path: Path, at_seconds: float, is_false: bool) -> None:
    expectation = Expectation(entry_of(tmp_path, **TRACKED), {"FLEET.a": "a"})
    for number, seconds in enumerate((1.5, 8.2, 20.0), 1):
        expectation.add(sent(number, "a", seconds))
    assert expectation.is_false_timeout("a", int(at_seconds * SECOND_NS)) is is_false


@pytest.mark.parametrize(
    ("keys", "subjects", "subject"),
    (
        ({}, ("REG.>",), "REG.%s"),
        ({}, ("REG.*.in.*", "B.>"), "REG.measured.in.%s"),
        ({"filter_subject": "REG.in.*.node"}, ("REG.>",), "REG.in.%s.node"),
        ({"inspect_subject_token": 4, "inspect_duration": "1h"}, ("REG.>",), "REG.measured.measured.%s"),
        ({"inspect_subject_token": 2, "inspect_duration": "1h"}, ("REG.*.*",), "REG.%s.measured"),
        ({}, ("REG",), "REG"),
        ({}, (), ""),
    ),
)
def test_subject_has_the_node_at_a_wildcard(
    tmp_path: Path, keys: dict[str, Any], subjects: tuple[str, ...], subject: str
) -> None:
    assert default_subject(entry_of(tmp_path, **keys), subjects) == subject


def test_load_reports_three_times_within_the_warning(tmp_path: Path) -> None:
    entry = entry_of(tmp_path, **TRACKED)
    paced = default_load(entry, None, None, None, paced=True)
    assert (paced.interval_seconds, paced.for_seconds, paced.payload_bytes) == (2, 6, 7_000)
    assert default_load(entry, None, 7_200, 2_000, paced=False).interval_seconds == 300
    with pytest.raises(
        ConfigurationError, match=r"--interval 6s: must be shorter than warn_duration \(6s\) of MEASURED/FLEET"
    ):
        default_load(entry, 6, None, None, paced=True)
    with pytest.raises(ConfigurationError, match="1s of messages every 2s: each node must send one"):
        default_load(entry, 2, 1, None, paced=True)


def test_stream_without_advisories_has_no_silence(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, **TRACKED)
    with pytest.raises(
        ConfigurationError, match="no stream with `inspect_duration` and an `advisory` block is configured"
    ):
        choose_entry(settings, None, announced=True)
    with pytest.raises(ConfigurationError, match="stream 'OTHER' is not configured"):
        choose_entry(settings, "OTHER", announced=False)
    assert choose_entry(settings, None, announced=False).stream == "FLEET"


def test_sender_that_an_emulated_node_lacks_is_refused(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, inspect_header="Node", inspect_duration="1h")
    entry = settings.streams[0]
    measured = MeasuredStream(settings, entry, "FLEET.%s")
    with pytest.raises(ConfigurationError, match="inspect_header does not find the sender of an emulated node"):
        measured.plan(3, default_load(entry, None, None, None, paced=True))


def test_watch_ends_when_nothing_new_is_found() -> None:
    polls = iter([1, 2, 2])
    watch("measuring", lambda: next(polls, 2), lambda: True, lambda: False, patience=0.2)
    assert next(polls, None) is None


def test_watch_tolerates_a_short_failure_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_UNREACHABLE_SECONDS", 0.0)

    def fail() -> int:
        raise WireError("127.0.0.1:1: no answer")

    with pytest.raises(RunError, match="no answer; no result"):
        watch("measuring", fail, lambda: True, lambda: True, patience=0.0)


@pytest.mark.parametrize("suite", ("pipeline", "silence", "catch-up"))
def test_unreachable_source_is_refused(suite: str, command: Command, tmp_path: Path) -> None:
    file = configure(tmp_path, "nats://127.0.0.1:1", "nats://127.0.0.1:2", **TRACKED, **ADVISED)
    options = ["--nodes", "3", "--out", str(tmp_path / "out")]
    code, output, errors = command("--config", str(file), "measure", suite, *options)
    assert (code, output, errors.count("\n")) == (1, "", 1)
    assert "127.0.0.1:1" in errors
    code, _, errors = command("--config", str(file), "measure", suite, *options)
    assert (code, errors) == (2, f"error: --out {tmp_path / 'out'}: already exists; name a new directory\n")


@pytest.mark.parametrize(
    ("suite", "option"), (("rpc", "--stream"), ("pipeline", "--url"), ("silence", "--backlog"), ("catch-up", "--ca"))
)
def test_option_of_another_suite_is_refused(suite: str, option: str, command: Command, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    code, _, errors = command("measure", suite, "--nodes", "3", "--out", out, option, "1")
    assert (code, errors) == (2, f"error: measure {suite} has no option {option}\n")
