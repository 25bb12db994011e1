"""More sites than run slots: sites are queued, and a host run serves them."""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from sr_assets.adapters import control
from sr_assets.adapters.run_failures import read_run_failures
from sr_assets.adapters.state.lock import lock_owner
from sr_assets.adapters.state.site_queue import dequeue_site, enqueue_site, queued_sites
from sr_assets.assets.host_run import HostRun, Result, run_limit
from sr_assets.assets.specs import site_job_name
from sr_assets.automation.sensors import RunSlots
from sr_assets.definitions import build
from sr_assets.domain.sizing import poll_seconds
from sr_assets.resources import HOST_KEY, LINGER, MODE_TAG
from sr_assets.settings import Settings
from sr_assets_tests.rig import Rig, Sent, wait_until

SITES = ("amsterdam", "berlin", "cairo")
TRACKED = {"inspect_field": "sender", "inspect_duration": "1h"}


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as local:
        yield local


@pytest.fixture
def single_run_instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """A user's own instance that allows one run at a time."""
    overrides = {"concurrency": {"runs": {"max_concurrent_runs": 1}}}
    with dg.DagsterInstance.local_temp(str(tmp_path), overrides=overrides) as local:
        yield local


@pytest.fixture
def settings(rig: Rig) -> Settings:
    """Three sites with one stream each, and one run slot."""
    for site in SITES:
        rig.add(rig.make(), name=site, target_subject_prefix="c", **TRACKED)
    return rig.settings(concurrency=1, linger="8s")


def test_site_queue_keeps_order_of_arrival(tmp_path: Path) -> None:
    assert queued_sites(tmp_path, 10.0) == []
    for site in ("b", "a", "c", "b"):
        enqueue_site(tmp_path, site, 10.0)
    assert queued_sites(tmp_path, 10.0) == ["b", "a", "c"]


def test_site_queue_drops_entry_that_is_not_renewed(tmp_path: Path) -> None:
    for site in ("a", "b"):
        enqueue_site(tmp_path, site, 10.0)
    control.change(tmp_path, "UPDATE site_queue SET renewed = renewed - 20 WHERE site = 'a'")
    assert queued_sites(tmp_path, 10.0) == ["b"]
    # It is queued again, at the end.
    enqueue_site(tmp_path, "a", 10.0)
    assert queued_sites(tmp_path, 10.0) == ["b", "a"]


def test_dequeued_site_is_not_queued_until_its_run_is_visible(tmp_path: Path) -> None:
    enqueue_site(tmp_path, "a", 10.0)
    assert dequeue_site(tmp_path, "a")
    assert not dequeue_site(tmp_path, "a")
    enqueue_site(tmp_path, "a", 10.0)
    assert queued_sites(tmp_path, 10.0) == []


def test_site_queue_ignores_entries_of_an_earlier_boot(tmp_path: Path) -> None:
    enqueue_site(tmp_path, "a", 10.0)
    # The monotonic clock restarts with the machine.
    since = time.monotonic() + 900
    control.change(tmp_path, "INSERT INTO site_queue VALUES ('rebooted', ?, ?, NULL)", since, since + 100)
    assert queued_sites(tmp_path, 10.0) == ["a"]
    enqueue_site(tmp_path, "rebooted", 10.0)
    assert queued_sites(tmp_path, 10.0) == ["a", "rebooted"]


def test_run_slot_goes_to_longest_waiting_site(settings: Settings, instance: dg.DagsterInstance) -> None:
    run_slots, home = RunSlots(settings), settings.home
    assert run_slots.acquire("amsterdam", instance)
    # Its run counts although it is not in the storage yet.
    assert not run_slots.acquire("cairo", instance)
    assert not run_slots.acquire("berlin", instance)
    job = build(settings).resolve_job_def(site_job_name(settings, "amsterdam"))
    run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags={MODE_TAG: LINGER})
    assert not run_slots.acquire("berlin", instance)
    assert queued_sites(home, 90.0) == ["cairo", "berlin"]
    instance.report_run_canceled(run)
    assert not run_slots.acquire("berlin", instance)
    assert run_slots.acquire("cairo", instance)
    assert queued_sites(home, 90.0) == ["berlin"]


def test_instance_limit_reduces_run_slots(settings: Settings, single_run_instance: dg.DagsterInstance) -> None:
    three = settings.changed(named_concurrency=3)
    run_slots = RunSlots(three)
    assert [run_slots.acquire(site, single_run_instance) for site in SITES] == [True, False, False]
    assert queued_sites(settings.home, 90.0) == ["berlin", "cairo"]
    assert run_limit(three, single_run_instance) == (1, "`max_concurrent_runs` of the Dagster instance")
    assert run_limit(settings, single_run_instance) == (1, "`concurrency`")


def test_run_without_process_frees_its_slot(
    settings: Settings, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_slots = RunSlots(settings)
    job = build(settings).resolve_job_def(site_job_name(settings, "amsterdam"))
    instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags={MODE_TAG: LINGER})
    # The run may be about to take its site's lock.
    assert not run_slots.acquire("berlin", instance)
    monkeypatch.setattr("sr_assets.automation.sensors.WITHOUT_LOCK_SECONDS", 0.0)
    assert run_slots.acquire("berlin", instance)


def test_no_site_is_queued_with_a_slot_for_each(settings: Settings, instance: dg.DagsterInstance) -> None:
    run_slots = RunSlots(settings.changed(named_concurrency=3))
    assert all(run_slots.acquire(site, instance) for site in (*SITES, *SITES))
    assert queued_sites(settings.home, 90.0) == []


@pytest.mark.parametrize(("sites", "seconds"), ((1, 1.0), (12, 1.44), (25, 3.0), (100, 12.0)))
def test_sites_rest_longer_the_more_a_process_serves(sites: int, seconds: float) -> None:
    assert poll_seconds(0.01, 60.0, sites) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("cost", "linger", "seconds"), ((0.01, 60, 1.0), (0.06, 60, 1.5), (0.9, 60, 2.0), (0.9, 3, 1.5), (0.9, 1, 1.0))
)
def test_site_polls_less_often_the_more_a_poll_costs(cost: float, linger: float, seconds: float) -> None:
    assert poll_seconds(cost, linger, 1) == pytest.approx(seconds)


def test_host_run_materializes_and_checks_queued_sites(
    rig: Rig, settings: Settings, single_run_instance: dg.DagsterInstance
) -> None:
    instance, settings = single_run_instance, rig.settings(concurrency=3, linger="8s")
    for stream in settings.streams:
        rig.publish(stream.stream, [Sent(b'{"sender": "%s"}' % stream.name.encode())])
    for site in SITES[1:]:
        enqueue_site(settings.home, site, 90.0)
    job = build(settings).resolve_job_def(site_job_name(settings, SITES[0]))
    result = job.execute_in_process(instance=instance, tags={MODE_TAG: LINGER})
    assert result.success
    assert {row["node"] for row in rig.rows("last_seen_nodes")} == set(SITES)
    assert [run.run_id for run in instance.get_runs()] == [result.run_id]
    for site in SITES:
        (entry,) = settings.sites[site]
        for noun in ("node_state", "replica", "node_snapshots"):
            records = instance.fetch_materializations(dg.AssetKey([*entry.asset_prefix, noun]), limit=10).records
            assert {record.run_id for record in records} == {result.run_id}
            assert records[0].asset_materialization is not None
            host = records[0].asset_materialization.metadata.get(HOST_KEY)
            assert (host is None) == (site == SITES[0])
        check = dg.AssetCheckKey(dg.AssetKey([*entry.asset_prefix, "replica"]), "no_loss")
        latest = instance.event_log_storage.get_latest_asset_check_execution_by_key([check])[check]
        assert latest.evaluation is not None
        assert (latest.run_id, latest.evaluation.passed) == (result.run_id, True)
        assert lock_owner(settings.home / "sites" / site) is None
    assert queued_sites(settings.home, 90.0) == []


@pytest.mark.nightly
def test_host_run_outlives_failed_hosted_run(rig: Rig, settings: Settings, instance: dg.DagsterInstance) -> None:
    berlin, cairo = settings.streams[1:]
    rig.api(f"STREAM.DELETE.{berlin.stream}")
    rig.publish(cairo.stream, [Sent(b'{"sender": "cairo"}')])
    for site in SITES[1:]:
        enqueue_site(settings.home, site, 90.0)
    host = build(settings).resolve_job_def(site_job_name(settings, "amsterdam"))
    result = host.execute_in_process(instance=instance, tags={MODE_TAG: LINGER})
    assert result.success
    messages = [record.user_message for record in instance.all_logs(result.run_id)]
    assert any(message.startswith(f"hosted site berlin failed: {berlin.label}") for message in messages)
    assert [row["node"] for row in rig.rows("last_seen_nodes")] == ["cairo"]
    for stream in (settings.streams[0], cairo):
        assert instance.get_latest_materialization_event(dg.AssetKey([*stream.asset_prefix, "replica"]))
    # The site's state has the failure, so `notify` does not need it a second time.
    assert read_run_failures(settings.home) == {}


def test_host_run_reports_hosted_site_whose_state_is_unreadable(
    rig: Rig, settings: Settings, instance: dg.DagsterInstance
) -> None:
    (settings.home / "sites" / "berlin").mkdir(parents=True)
    (settings.home / "sites" / "berlin" / "state.duckdb").write_text("not a database")
    enqueue_site(settings.home, "berlin", 90.0)
    host = build(settings).resolve_job_def(site_job_name(settings, "amsterdam"))
    result = host.execute_in_process(instance=instance, tags={MODE_TAG: LINGER})
    assert result.success
    (failure,) = read_run_failures(settings.home).values()
    assert (failure.job, failure.run_id, failure.name) == (site_job_name(settings, "berlin"), result.run_id, "berlin")
    assert "state.duckdb" in failure.reason


def test_many_events_of_hosted_sites_leave_time_for_the_host(settings: Settings) -> None:
    """Dagster takes longer to record the events than the host's own site may wait for its next round."""
    events = [dg.AssetMaterialization(f"a{number}") for number in range(100)]
    ended = threading.Event()

    def hosted(*_: object) -> Iterator[dg.AssetMaterialization]:
        yield from events
        ended.set()

    enqueue_site(settings.home, "berlin", 10.0)
    host = HostRun(settings.changed(linger_ns=3 * 3_600 * 10**9), "run", 1, hosted, logging.getLogger("test"))
    with host.open(lingers=True):
        wait_until(lambda: ended.is_set() and host.sites_served == 1, "the hosted run to end")
        # It began and ended between two looks.
        assert host.keep_running
        recorded = 0
        for _ in host.results():
            recorded += 1
            # Stands for Dagster's storage.
            time.sleep(0.1)
    assert 1 <= recorded <= 4
    assert len(list(host.results(ended=True))) == 100 - recorded


@pytest.mark.nightly
def test_host_run_lasts_six_budgets_while_it_hosts(
    rig: Rig, settings: Settings, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    cairo = settings.streams[2]
    settings = rig.settings(concurrency=1, linger="3h", run_budget="10m")
    minutes, results = list[float](), HostRun.results

    def move(host: HostRun, **options: bool) -> Iterator[Result]:
        # Between the rounds of the host's own site, which then waits for no response.
        if minutes:
            rig.travel(minutes=minutes[0])
            minutes.clear()
        return results(host, **options)

    monkeypatch.setattr(HostRun, "results", move)
    job = build(settings).resolve_job_def(site_job_name(settings, "amsterdam"))
    running = threading.Thread(
        target=job.execute_in_process, kwargs={"instance": instance, "tags": {MODE_TAG: LINGER}}, daemon=True
    )
    running.start()

    def is_copied(count: int) -> bool:
        # As its sensor does whenever the site has no run.
        enqueue_site(settings.home, "cairo", 90.0)
        copied = rig.api(f"STREAM.INFO.{cairo.stream}", server=rig.target).get("state", {}).get("messages")
        return copied == count or not running.is_alive()

    rig.publish(cairo.stream, [Sent(b'{"sender": "cairo"}')])
    wait_until(lambda: is_copied(1), "the first hosted run")
    minutes.append(50)
    wait_until(lambda: not minutes, "the move")
    wait_until(lambda: lock_owner(settings.home / "sites" / "cairo") is None, "the hosted run's end")
    rig.publish(cairo.stream, [Sent(b'{"sender": "giza"}')])
    wait_until(lambda: is_copied(2), "another hosted run")
    assert running.is_alive(), "the host run did not last six budgets"
    minutes.append(20)
    wait_until(lambda: not running.is_alive(), "the host run's end")
    (run,) = instance.get_runs()
    assert run.status is dg.DagsterRunStatus.SUCCESS
    key = dg.AssetKey([*cairo.asset_prefix, "replica"])
    assert instance.fetch_materializations(key, limit=10).records
    assert "giza" in {row["node"] for row in rig.rows("last_seen_nodes")}
