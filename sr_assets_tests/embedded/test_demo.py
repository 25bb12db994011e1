"""The demo as a user runs it: on a machine with Python alone, checked by its last line; and stopped at any time."""

import json
import re
import signal
import urllib.request
from pathlib import Path

import pytest

from sr_assets.domain.errors import ConfigurationError
from sr_assets.embedded.demo import CITIES, configuration, run_demo
from sr_assets.settings import load_settings
from sr_assets_tests.demo_process import DemoProcess
from sr_assets_tests.rig import PATIENCE_SECONDS

NODES = 40


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine without Java: a HOME, and a PATH with everything else."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in [*Path("/bin").iterdir(), *Path("/usr/bin").iterdir()]:
        if not program.name.startswith("java") and not (programs / program.name).is_symlink():
            (programs / program.name).symlink_to(program)
    return {"HOME": str(tmp_path), "PATH": str(programs)}


def _scrape(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
        metrics: bytes = answer.read()
        return metrics


@pytest.mark.timeout(600)
@pytest.mark.process
def test_headless_demo_succeeds_without_java_and_leaves_nothing(tmp_path: Path, bare: dict[str, str]) -> None:
    arguments = ("--no-ui", "--for", "45", "--json", "--nodes", str(NODES))
    with DemoProcess(tmp_path, *arguments, environ=bare) as demo:
        demo.await_output("first rows")
        address = re.search(r"http://127\.0\.0\.1:\d+/metrics", demo.errors)
        assert address, demo.errors
        demo.await_condition(lambda: b"sr_assets_nodes{" in _scrape(address[0]), "its metrics")
        code = demo.process.wait()
        assert demo.left() == []
    result = json.loads(demo.written)
    assert result["failed"] == [], demo.errors
    assert code == 0
    assert 45 <= result["seconds"] < 75
    assert set(result["streams"]) == {
        f"{city}/CHORIA_{stream}" for city in ("london", "paris") for stream in ("REGISTRATION", "ADVISORIES")
    }
    for label, stream in result["streams"].items():
        assert stream["lag_messages"] == 0
        assert stream["position"] == stream["source_messages"] == stream["copied"] + stream["skipped"]
        assert stream["copied"] < stream["skipped"] or label.endswith("/CHORIA_ADVISORIES")
    registrations, advisories = (
        {city: result["streams"][f"{city}/CHORIA_{stream}"]["source_messages"] for city in ("london", "paris")}
        for stream in ("REGISTRATION", "ADVISORIES")
    )
    for label, messages in (
        ("LONDON_MIRROR", registrations["london"]),
        ("CITIES_ADVISORIES", sum(advisories.values())),
    ):
        held = {"messages": messages, "origin_messages": messages, "lag_messages": 0}
        assert result["native"].pop(f"centre/{label}") == held
    assert result["native"] == {}
    assert set(result["advisories"]) == {"new", "timeout", "recover", "expire"}
    assert all(result["advisories"].values())
    tables = result["tables"]
    assert tables["node_availability"] == tables["node_snapshots"] == 2 * NODES
    assert tables["last_seen_nodes"] + tables["retired_nodes"] == 2 * NODES
    assert tables["node_advisories"] == sum(result["advisories"].values()) == tables["global_advisories"]
    assert tables["global_availability"] == 2 * NODES
    # A mirror, two sources, four replicas and the feed.
    assert tables["topology_links"] == 8
    assert (tables["global_summary"], tables["global_rejects"]) == (2, 0)
    assert not list(tmp_path.glob("sr-assets-demo-*")), "the temporary home was not deleted"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "number",
    (signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.nightly) for number in (signal.SIGINT, signal.SIGHUP))),
)
@pytest.mark.process
def test_demo_stopped_during_its_start_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with DemoProcess(tmp_path, "--no-ui", "--nodes", "4") as demo:
        demo.await_output("NATS servers")
        # Dagster and Spark are starting.
        demo.await_condition(lambda: len(demo.left()) > 4, "more than the servers")
        demo.process.send_signal(number)
        assert demo.process.wait(PATIENCE_SECONDS) == 0, demo.errors
        assert demo.left() == []
    assert "Traceback" not in demo.errors
    assert not list(tmp_path.glob("sr-assets-demo-*"))


@pytest.mark.parametrize("count", (1, 2, 3, len(CITIES)))
def test_configuration_treats_all_cities_alike(tmp_path: Path, count: int) -> None:
    cities = CITIES[:count]
    urls = {name: f"nats://127.0.0.1:{port}" for port, name in enumerate((*cities, "centre"), 1)}
    file = tmp_path / 'a "demo" of ours.yaml'
    file.write_text(configuration(cities, file.with_suffix(""), urls))
    settings = load_settings(file, {})
    assert settings.home == file.with_suffix("")
    assert tuple(settings.sites) == (*cities, "centre")
    registrations, advisories = settings.streams[::2], settings.streams[1::2]
    for number, (stream, advisory_stream) in enumerate(zip(registrations, advisories, strict=True), 1):
        for entry in (stream, advisory_stream):
            assert entry.name == cities[number - 1]
            assert entry.source.servers == (f"127.0.0.1:{number}",)
            assert entry.target.servers == (f"127.0.0.1:{count + 1}",)
        assert stream.target_stream == f"{stream.name.upper()}_REGISTRATION"
        assert stream.prefix == stream.name
        assert stream.policy == settings.streams[0].policy
        assert stream.advisory is not None
        assert stream.advisory.subject == f"choria.stream.advisories.{stream.name}.%s.%v"
        assert (advisory_stream.stream, advisory_stream.target_stream) == ("CHORIA_ADVISORIES", "ADVISORIES")
        assert not advisory_stream.tracked
    assert settings.topology is not None
    assert set(settings.topology.clusters) == {"centre", *cities}
    mirror, gathered = settings.topology.streams
    assert mirror.mirror is not None
    assert mirror.mirror.api == "$JS.london.API"
    assert [upstream.cluster for upstream in gathered.sources] == list(cities)
    for source in {entry.source for entry in settings.entries}:
        assert settings.topology.cluster_of(source), "it is joined to the native streams"
    (feed,) = settings.feeds
    assert (feed.stream, feed.source) == ("ADVISORIES", advisories[0].target)


def test_home_with_other_files_is_refused_unchanged(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="is neither empty nor a demo"):
        run_demo(home=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["diary.txt"]
