"""The workloads of the bench, small: what they measure is no matter here, that each does its work is."""

from pathlib import Path
from typing import Any

import pytest

from sr_assets.embedded.bench import feeds, sampling, waiting
from sr_assets.embedded.bench.copying import measure_copy, measure_workers
from sr_assets.embedded.bench.rig import Bench
from sr_assets.embedded.nats_server import NatsServer


@pytest.fixture
def bench(engine_home: Path, nats_pair: tuple[NatsServer, NatsServer]) -> Bench:
    bench = Bench(engine_home, *nats_pair)
    bench.forget()
    return bench


def rates(found: dict[str, Any]) -> list[Any]:
    return [value for figure, value in found.items() if figure.endswith("_per_second")]


@pytest.mark.parametrize("direct", (True, False))
def test_a_copy_is_measured_beside_a_mirror_and_one_at_a_time(bench: Bench, *, direct: bool) -> None:
    found = measure_copy(bench, 512, 300, direct=direct)
    assert len(rates(found)) == 3
    assert all(rate > 0 for rate in rates(found))
    assert found["times_mirror"] > 0 < found["times_one_at_a_time"]


def test_workers_are_measured_beside_one_another(bench: Bench) -> None:
    assert len([rate for rate in rates(measure_workers(bench, 1_000, 200)) if rate > 0]) == 2


def test_of_a_known_fleet_one_message_in_ten_is_due(bench: Bench) -> None:
    found = sampling.measure_sampled(bench, 300, 200, 1_000)
    assert found["copied_share"] == 0.1
    assert all(rate > 0 for rate in rates(found))


def test_a_backlog_is_measured_beside_a_tenth_of_it(bench: Bench) -> None:
    found = sampling.measure_backlog(bench, 1_000, 50)
    assert (found["short_messages"], found["long_messages"]) == (100, 1_000)
    assert all(rate > 0 for rate in rates(found))


def test_nodes_are_known_before_a_run_is_measured(bench: Bench) -> None:
    assert sampling.measure_tracked(bench, 3_000)["run_seconds"] > 0


def test_quiet_streams_ask_for_no_run(bench: Bench) -> None:
    assert waiting.measure_quiet(bench, 2)["cpu_seconds_per_hour"] > 0


def test_a_feed_is_folded_and_asked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "_PROBES", 2)
    monkeypatch.setattr(feeds, "_WARM_NODES", 100)
    found = feeds.measure_feeds(bench, 400)
    assert found["advisories"] == 300
    assert found["nodes_global_seconds"] > 0
