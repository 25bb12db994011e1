"""Warnings of `sr-assets run` about mistakes that do not stop it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.published.fleet_reader import open_fleet, read_rows
from sr_assets.adapters.spark.engine import stop_engine
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.settings import parse_cluster
from sr_assets_tests.operate.rig import configure, run
from sr_assets_tests.rig import Command


@pytest.fixture
def entry(
    tmp_path: Path, nats_pair: tuple[NatsServer, NatsServer], unique: Callable[[str], str]
) -> Iterator[dict[str, Any]]:
    """Add an entry whose source has a registration and whose advisories no stream stores; stop the engine afterwards."""
    source, target = nats_pair
    stream = unique("REG")
    with Cluster(parse_cluster(source.url)) as cluster:
        cluster.create_stream({"name": stream, "subjects": [f"{stream}.>"], "allow_direct": True})
        cluster.publish_many([(f"{stream}.{number}", b'{"sender": "web1"}', str(number)) for number in range(3)])
    yield {
        "name": "london",
        "stream": stream,
        "source_url": source.url,
        "target_url": target.url,
        "target_stream": f"LONDON_{stream}",
        "target_subject_prefix": "london",
        "inspect_field": "sender",
        "inspect_duration": "1h",
        "advisory": {"subject": f"nobody.{stream}.%s.%v", "reliable": True},
    }
    stop_engine((tmp_path / "home").resolve())


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("warning: ")]


def test_run_warns_about_configuration_mistakes(
    entry: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    stream = entry["stream"]
    misspelt = {**entry, "name": "paris", "target_stream": f"PARIS_{stream}", "inspect_field": "sendr"}
    misspelt["target_subject_prefix"] = "paris"
    settings = configure(tmp_path, monkeypatch, [entry, misspelt])
    ended = run("--once")
    assert ended.returncode == 0, ended.stderr
    waiting, without = sorted(warnings(ended.stderr))
    assert waiting.startswith(f"warning: london/{stream}: no stream on ")
    assert waiting.endswith(f"takes nobody.{stream}.*.>: 1 advisories wait; create such a stream")
    assert without.startswith(f"warning: paris/{stream}: 3 of 3 messages have no sender (inspect_field: sendr)")

    # A renamed entry starts over, next to the copies that it made under its old name.
    configure(tmp_path, monkeypatch, [{**entry, "name": "londn"}])
    code, output, errors = command("check", "--connect", "--format", "json")
    (probe,) = (probe for probe in json.loads(output) if probe["tried"] == "no other copies of the source")
    assert (code, probe["result"]) == (1, "failed")
    assert "holds copies of the same source by US-EAST/london, so it gets every message twice" in errors
    ended = run("--once")
    assert f"site london has a state ({stream}), but no entry has that name" in ended.stderr
    assert "`sr-assets forget --site paris`" in ended.stderr
    assert "holds copies of the same source by US-EAST/london, so it gets every message twice" in ended.stderr
    with open_fleet(settings.home) as connection:
        names = read_rows(connection, "SELECT name FROM last_seen_nodes ORDER BY name").values
    assert names == [("londn",), ("london",)]
