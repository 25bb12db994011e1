"""Each workload of the bench runs, with few messages; the tests do not judge the figures."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sr_assets_bench import (
    commands,
    daily,
    definitions,
    disk,
    feeds,
    growth,
    outage,
    publication,
    sampling,
    silence,
    waiting,
)
from sr_assets_bench.copying import measure_copy, measure_workers
from sr_assets_bench.day import compare_events, expected_events, measure_day
from sr_assets_bench.history import measure_history
from sr_assets_bench.links import measure_links, measure_report
from sr_assets_bench.proof import measure_proof
from sr_assets_bench.rig import Bench
from sr_assets_bench.scrape import measure_scrape
from sr_assets_bench.sizing import measure_sizing
from sr_assets_bench.trickle import measure_trickle
from sr_assets_tests.servers import NatsServer

#: A separate process, because a classic session and its environment variables last until the process ends.
_ON_A_CLUSTER = """
import json
from sr_assets_bench.cluster import measure_cluster
from sr_assets_bench.rig import open_bench

with open_bench() as bench:
    print(json.dumps(measure_cluster(bench, 1_500, rounds=1)))
"""


@pytest.fixture
def bench(engine_home: Path, nats_pair: tuple[NatsServer, NatsServer]) -> Bench:
    bench = Bench(engine_home, *nats_pair)
    bench.forget()
    # Other tests of this session have had this home.
    for folder in ("dagster", "availability", "inventory"):
        shutil.rmtree(bench.home / folder, ignore_errors=True)
    return bench


def rates(figures: dict[str, Any]) -> list[Any]:
    return [value for figure, value in figures.items() if figure.endswith("_per_second")]


@pytest.mark.nightly
@pytest.mark.parametrize("direct", (True, False))
def test_copy_is_compared_with_mirror_and_one_at_a_time(bench: Bench, *, direct: bool) -> None:
    figures = measure_copy(bench, 512, 300, direct=direct)
    # The rate without the costs of a run is a difference, which so few messages do not determine.
    kinds = ("ours", "async", "mirror", "one_at_a_time")
    assert min(figures[f"{kind}_per_second"] for kind in kinds) > 0
    assert figures["times_mirror"] > 0 < figures["times_one_at_a_time"]


@pytest.mark.nightly
def test_commands_are_measured_as_processes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "ROUNDS", 1)
    figures = commands.measure_commands(bench, 300)
    assert figures["few_whole_seconds"] > figures["few_first_seconds"] > 0
    assert min(figures[f"{name}_seconds"] for name in ("idle_whole", "lag", "nodes", "query")) > 0


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.process
def test_cluster_is_compared_with_the_local_engine() -> None:
    done = subprocess.run([sys.executable, "-c", _ON_A_CLUSTER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len([rate for rate in rates(json.loads(done.stdout)) if rate > 0]) == 4


@pytest.mark.nightly
def test_links_and_report_are_measured(bench: Bench) -> None:
    figures = measure_links(bench, 300)
    assert len([rate for rate in rates(figures) if rate > 0]) == 3
    report = measure_report(bench, 2, 8)
    assert (report["streams"], report["links"]) == (8, 4)


@pytest.mark.nightly
def test_one_worker_is_compared_with_two(bench: Bench) -> None:
    assert len([rate for rate in rates(measure_workers(bench, 1_000, 200)) if rate > 0]) == 2


@pytest.mark.nightly
def test_one_message_in_ten_of_a_tracked_fleet_is_copied(bench: Bench) -> None:
    figures = sampling.measure_sampled(bench, 300, 200, 1_000)
    assert figures["copied_share"] == 0.1
    assert all(rate > 0 for rate in rates(figures))


@pytest.mark.long
def test_sampling_by_subject_is_measured(bench: Bench) -> None:
    figures = sampling.measure_unread(bench, 30, 10, rounds=1)
    assert len(rates(figures)) == 6
    assert all(rate > 0 for rate in rates(figures))


@pytest.mark.long
def test_backlog_is_compared_with_a_tenth_of_it(bench: Bench) -> None:
    figures = sampling.measure_backlog(bench, 1_000, 50)
    assert (figures["short_messages"], figures["long_messages"]) == (100, 1_000)
    assert all(rate > 0 for rate in rates(figures))


@pytest.mark.nightly
def test_run_with_tracked_nodes_is_measured(bench: Bench) -> None:
    assert sampling.measure_tracked(bench, 3_000)["run_seconds"] > 0


@pytest.mark.nightly
def test_silent_fleet_is_published(bench: Bench) -> None:
    figures = silence.measure_silence(bench, 300)
    assert figures["timeouts"] == figures["advisories"] == 300
    assert figures["quiet_peak_mib"] > 50


@pytest.mark.long
@pytest.mark.timeout(300)
def test_fleet_is_compared_with_its_messages(bench: Bench) -> None:
    """Also on a busy machine, whose late messages are real silence."""
    figures = measure_proof(bench, 600, 30)
    assert (figures["copies"], figures["new_advisories"]) == (600, 600)
    assert figures["timeout_advisories"] >= figures["planned_timeouts"] > 0
    assert figures["recover_advisories"] > 0
    wrong = {name: value for name, value in figures.items() if name.startswith(("missing", "wrong"))}
    assert set(wrong.values()) == {0}, wrong


# The tests of the sensors show that an idle stream requests no run.
@pytest.mark.nightly
def test_idle_streams_request_no_run(bench: Bench) -> None:
    assert waiting.measure_quiet(bench, 2)["cpu_seconds_per_hour"] > 0


@pytest.mark.nightly
def test_history_compaction_and_lookup_are_measured(bench: Bench) -> None:
    figures = measure_history(bench, 90, 50)
    assert (figures["rows"], figures["row_groups"]) == (9_000, 1)
    assert 1 < figures["rewritten_times"] <= 3
    assert figures["minute_files"] <= 20
    assert figures["minute_group_rows"] >= 4_000
    assert figures["newest_ms"] > 0 < figures["history_ms"]


@pytest.mark.long
def test_trickle_is_measured_under_follow(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "PROBES", 1)
    figures = measure_trickle(bench, 5, warm_seconds=2, seconds=3)
    assert figures["percent_of_a_core"] > 0
    assert figures["queryable_p50"] >= figures["target_p50"] > 0


@pytest.mark.long
def test_sizing_counts_each_process_of_a_fleet_apart(bench: Bench) -> None:
    figures = measure_sizing(bench, 3_000, warm_seconds=1, seconds=3)
    assert figures["messages_per_second"] > 0 < figures["peak_mib"]
    assert all(figures[f"{name}_percent_of_a_core"] > 0 for name in ("ours", "source", "emulator"))
    assert figures["slowest_lag_seconds"] > 0


@pytest.mark.long
def test_transitions_are_measured_with_target_up_and_down(
    engine_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "PROBES", 1)
    # Separate servers, because the test stops one.
    with NatsServer(tmp_path / "source", "source") as source, NatsServer(tmp_path / "target", "target") as target:
        bench = Bench(engine_home, source, target)
        bench.forget()
        figures = outage.measure_transitions(bench)
    assert figures["target_up_p50"] > 0 < figures["target_down_p50"]


@pytest.mark.nightly
def test_copy_queue_is_compared_with_a_tenth_of_it(bench: Bench) -> None:
    figures = outage.measure_queue(bench, 1_000)
    assert (figures["short_messages"], figures["long_messages"]) == (100, 1_000)
    assert all(rate > 0 for rate in rates(figures))


@pytest.mark.nightly
def test_publication_is_measured_at_sites_and_a_centre(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "_OTHERS", {"alone": 0, "beside_10": 1, "beside_100": 2})
    monkeypatch.setattr(publication, "_ROUNDS", 1)
    figures = publication.measure_publication(bench, 150)
    assert figures["alone_seconds"] > 0 < figures["centre_seconds"]
    assert figures["centre_nodes"] == 15_000
    assert 0 < figures["centre_written_kib"] < 100


def test_availability_of_a_month_equals_sql(bench: Bench) -> None:
    figures = daily.measure_availability(bench, 40)
    assert (figures["rows"], figures["transitions"], figures["differing_rows"]) == (1_200, 1_200, 0)


def test_inventory_of_a_week_equals_sql(bench: Bench) -> None:
    figures = daily.measure_inventory(bench, 40)
    assert figures["messages"] > 40 * 7
    assert figures["rows"] > 7 * 10
    assert figures["differing_rows"] == 0


@pytest.mark.long
def test_feed_is_folded_and_queried(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "_PROBES", 2)
    monkeypatch.setattr(feeds, "_WARM_NODES", 100)
    figures = feeds.measure_feeds(bench, 400)
    assert figures["advisories"] == 300
    assert figures["nodes_global_seconds"] > 0


@pytest.mark.nightly
def test_scrape_is_measured_idle_and_busy(bench: Bench) -> None:
    figures = measure_scrape(bench, 2)
    assert figures["streams"] == 20
    assert 0 < figures["quiet_seconds"] <= figures["quiet_max_seconds"]
    assert figures["busy_seconds"] > 0
    assert figures["samples"] > 20 * 20


@pytest.mark.nightly
def test_definitions_are_measured_for_few_and_many_sites(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definitions, "SITES", (4, 5, 8))
    figures = definitions.measure_definitions(bench)
    assert figures["snapshot_mb_8"] < figures["snapshot_with_jobs_mb_8"]
    assert figures["load_seconds_8"] > 0


@pytest.mark.nightly
def test_dagster_storage_is_measured_after_the_nightly_job(bench: Bench) -> None:
    figures = disk.measure_disk(bench, 20)
    # They are younger than a week; with the real run, and the nightly job's own.
    assert figures["left_runs"] == 22
    assert figures["run_kib"] > 100


@pytest.mark.long
def test_growth_is_measured_in_processes_of_their_own(bench: Bench) -> None:
    figures = growth.measure_growth(bench, 3_000)
    steps = ("publish_all", "publish_few", "run_idle", "run_900", "nodes")
    assert all(figures[f"{step}_cpu_seconds"] > 0 for step in steps)
    assert all(figures[f"{step}_peak_mib"] > 50 for step in steps)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_day_on_a_compressed_clock_has_the_advisories_of_its_plan(bench: Bench) -> None:
    figures = measure_day(bench, 40, 2, 1_000)
    assert (figures["missing"], figures["false_alarms"]) == (0, 0)
    assert figures["advisories_timeout"] > figures["advisories_recover"] > 0
    assert figures["advisories_new"] > 40


def test_plan_of_a_day_gives_the_events_of_each_silence() -> None:
    expected = expected_events({"short": [10, 1_000, 1_300], "long": [20, 5_000], "stopped": [30]}, 5_010)
    assert [event for event, _ in expected["short"]] == ["new", "timeout", "recover", "timeout", "expire"]
    assert expected["long"] == [("new", 20), ("timeout", 770), ("expire", 3_470), ("new", 5_000)]
    assert [event for event, _ in expected["stopped"]] == ["new", "timeout", "expire"]


def test_comparison_of_a_day_names_missing_and_false_advisories() -> None:
    plan = {"a": [("new", 10.0), ("timeout", 760.0)]}
    assert compare_events(plan, {"a": [("new", 12.0), ("timeout", 790.0)]}) == ([], [])
    announced = {"a": [("new", 10.0), ("timeout", 860.0)], "b": [("expire", 9.0)]}
    missing, false = compare_events(plan, announced)
    assert (missing, sorted(false)) == (["a: timeout at 760 s"], ["a: timeout at 860 s", "b: expire at 9 s"])
