"""More sites than may run at a time: they wait in line, and a run of another site serves them."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import dagster as dg
import pytest

from sr_assets.adapters.state.lock import lock_owner
from sr_assets.adapters.state.site_queue import dequeue_site, enqueue_site, queued_sites
from sr_assets.automation import RunSlots, site_job_name
from sr_assets.automation.run_slots import run_limit
from sr_assets.definitions import build
from sr_assets.domain.sizing import rest_seconds
from sr_assets.resources import HOSTED, LINGER, MODE_TAG
from sr_assets.settings import Settings
from sr_assets_tests.rig import Rig, Sent

SITES = ("amsterdam", "berlin", "cairo")
TRACKED = {"inspect_field": "sender", "inspect_duration": "1h"}


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as local:
        yield local


@pytest.fixture
def narrow(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """An instance of somebody's own that lets one run go on at a time."""
    overrides = {"concurrency": {"runs": {"max_concurrent_runs": 1}}}
    with dg.DagsterInstance.local_temp(str(tmp_path), overrides=overrides) as local:
        yield local


@pytest.fixture
def settings(rig: Rig) -> Settings:
    """Three sites with a stream each, one at a time."""
    for site in SITES:
        rig.add(rig.make(), name=site, target_subject_prefix="c", **TRACKED)
    return rig.settings(concurrency=1, linger="3s")


def test_the_line_is_in_order_of_arrival_and_who_does_not_renew_has_left(tmp_path: Path) -> None:
    assert queued_sites(tmp_path, 10.0) == []
    for site in ("b", "a", "c"):
        enqueue_site(tmp_path, site, 10.0)
    enqueue_site(tmp_path, "b", 10.0)
    assert queued_sites(tmp_path, 10.0) == ["b", "a", "c"]
    since, renewed = (tmp_path / "waiting" / "a").read_text().split()
    (tmp_path / "waiting" / "a").write_text(f"{since} {float(renewed) - 20}")
    assert queued_sites(tmp_path, 10.0) == ["b", "c"]
    assert dequeue_site(tmp_path, "b")
    assert not dequeue_site(tmp_path, "b")
    # Its run cannot be seen yet: who did not notice must not put it in line again.
    enqueue_site(tmp_path, "b", 10.0)
    assert queued_sites(tmp_path, 10.0) == ["c"]
    # It has left the line without being taken: it comes last.
    enqueue_site(tmp_path, "a", 10.0)
    assert queued_sites(tmp_path, 10.0) == ["c", "a"]
    assert dequeue_site(tmp_path, "a")
    (tmp_path / "waiting" / "broken").write_text("")
    (tmp_path / "waiting" / "before the last boot").write_text(f"{time.monotonic() + 900} {time.monotonic() + 1000}")
    assert queued_sites(tmp_path, 10.0) == ["c"]
    enqueue_site(tmp_path, "before the last boot", 10.0)
    assert queued_sites(tmp_path, 10.0) == ["c", "before the last boot"]


def test_who_waits_longest_gets_the_next_place(settings: Settings, instance: dg.DagsterInstance) -> None:
    places, home = RunSlots(settings), settings.home
    assert places.take("amsterdam", instance)
    # Its run is not in the storage yet, and counts.
    assert not places.take("cairo", instance)
    assert not places.take("berlin", instance)
    job = build(settings).resolve_job_def(site_job_name("amsterdam"))
    run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags={MODE_TAG: LINGER})
    assert not places.take("berlin", instance)
    assert queued_sites(home, 10.0) == ["cairo", "berlin"]
    instance.report_run_canceled(run)
    assert not places.take("berlin", instance)
    assert places.take("cairo", instance)
    assert queued_sites(home, 10.0) == ["berlin"]


def test_an_instance_that_lets_fewer_run_has_fewer_places(settings: Settings, narrow: dg.DagsterInstance) -> None:
    wide = replace(settings, concurrency=3)
    places = RunSlots(wide)
    assert [places.take(site, narrow) for site in SITES] == [True, False, False]
    assert queued_sites(settings.home, 10.0) == ["berlin", "cairo"]
    assert run_limit(wide, narrow) == (1, "`max_concurrent_runs` of the Dagster instance")
    assert run_limit(settings, narrow) == (1, "`concurrency`")


def test_a_run_whose_process_is_gone_holds_its_place_no_longer(
    settings: Settings, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = RunSlots(settings)
    job = build(settings).resolve_job_def(site_job_name("amsterdam"))
    instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags={MODE_TAG: LINGER})
    # It may be about to take its site's lock.
    assert not taken.take("berlin", instance)
    monkeypatch.setattr("sr_assets.automation.run_slots.WITHOUT_LOCK_SECONDS", 0.0)
    assert taken.take("berlin", instance)


def test_where_there_is_a_place_for_each_nobody_waits(settings: Settings, instance: dg.DagsterInstance) -> None:
    places = RunSlots(replace(settings, concurrency=3))
    assert all(places.take(site, instance) for site in (*SITES, *SITES))
    assert queued_sites(settings.home, 10.0) == []


@pytest.mark.parametrize(("sites", "seconds"), ((1, 1.5), (12, 1.5), (25, 3.0), (100, 12.0)))
def test_the_more_sites_a_process_serves_the_longer_each_rests(sites: int, seconds: float) -> None:
    assert rest_seconds(sites) == pytest.approx(seconds)


def test_a_run_serves_the_sites_that_wait_each_in_a_run_of_its_own(
    rig: Rig, settings: Settings, narrow: dg.DagsterInstance
) -> None:
    instance, settings = narrow, rig.settings(concurrency=3, linger="3s")
    for stream in settings.streams:
        rig.publish(stream.stream, [Sent(b'{"sender": "%s"}' % stream.name.encode())])
    for site in SITES[1:]:
        enqueue_site(settings.home, site, 90.0)
    job = build(settings).resolve_job_def(site_job_name(SITES[0]))
    assert job.execute_in_process(instance=instance, tags={MODE_TAG: LINGER}).success
    assert {row["node"] for row in rig.rows("last_seen_nodes")} == set(SITES)
    runs = {run.job_name: run for run in instance.get_runs()}
    assert runs.keys() == {site_job_name(site) for site in SITES}
    assert {run.status for run in runs.values()} == {dg.DagsterRunStatus.SUCCESS}
    host = runs[site_job_name(SITES[0])]
    for site in SITES[1:]:
        guest = runs[site_job_name(site)]
        assert (guest.tags[MODE_TAG], guest.tags["sr_assets/host"]) == (HOSTED, host.run_id)
        (entry,) = settings.sites[site]
        key = dg.AssetKey([*entry.asset_prefix, "node_state"])
        (record,) = instance.fetch_materializations(key, limit=10).records
        assert record.run_id == guest.run_id
        assert lock_owner(settings.home / "sites" / site) is None
    assert queued_sites(settings.home, 10.0) == []


def test_a_host_goes_on_for_its_guests_and_one_that_fails_leaves_the_others_alone(
    rig: Rig, settings: Settings, instance: dg.DagsterInstance
) -> None:
    rig.api(f"STREAM.DELETE.{settings.streams[1].stream}")
    rig.publish(settings.streams[2].stream, [Sent(b'{"sender": "cairo"}')])
    settings = rig.settings(concurrency=1, linger="5m", run_budget="4s")
    jobs = {site: site_job_name(site) for site in SITES}
    host = build(settings).resolve_job_def(jobs["amsterdam"])
    running = threading.Thread(
        target=host.execute_in_process, kwargs={"instance": instance, "tags": {MODE_TAG: LINGER}}, daemon=True
    )
    began = time.monotonic()
    running.start()
    enqueue_site(settings.home, "berlin", 90.0)
    while running.is_alive():
        # As its sensor does whenever the site has no run.
        enqueue_site(settings.home, "cairo", 90.0)
        running.join(0.5)
        assert time.monotonic() - began < 90.0, "the host does not end"
    assert time.monotonic() - began > 24.0, "the host has not gone on for six times its budget"
    runs = instance.get_runs()
    assert [run.status for run in runs if run.job_name == jobs["amsterdam"]] == [dg.DagsterRunStatus.SUCCESS]
    assert [run.status for run in runs if run.job_name == jobs["berlin"]] == [dg.DagsterRunStatus.FAILURE]
    # One after the other, as many as this machine makes in that time.
    assert {run.status for run in runs if run.job_name == jobs["cairo"]} == {dg.DagsterRunStatus.SUCCESS}
    assert [row["node"] for row in rig.rows("last_seen_nodes")] == ["cairo"]
