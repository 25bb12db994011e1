"""The lag sensor over several ticks, with real servers and a real instance."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from sr_assets.adapters.state.lock import SiteLock
from sr_assets.adapters.state.operator_settings import set_paused
from sr_assets.assets.specs import site_job_name, stream_key
from sr_assets.automation import sensors
from sr_assets.automation.observing import find_work, share_stream_infos
from sr_assets.definitions import build
from sr_assets.domain.errors import RunError
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.resources import HOME_TAG, MODE_TAG
from sr_assets.settings import Settings, load_settings
from sr_assets.stages.leadership import Leadership
from sr_assets.stages.tracking.node_state import NodeStage
from sr_assets_tests.members import make_bucket, member
from sr_assets_tests.rig import SITE, Rig, Sent, cluster, edit_status, wait_until

TRACKED = {"inspect_field": "sender", "inspect_duration": "10s", "warn_duration": "1s"}


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as ephemeral:
        yield ephemeral


def tick(settings: Settings, instance: dg.DagsterInstance, cursor: str | None = None) -> dg.SensorResult:
    """Evaluate the site's sensor once, as the daemon does."""
    sensor = build(settings).resolve_sensor_def(f"{SITE}_lag")
    with dg.build_sensor_context(instance=instance, cursor=cursor, definitions=build(settings)) as context:
        result = sensor(context)
    assert isinstance(result, dg.SensorResult)
    return result


def reason(result: dg.SensorResult) -> str | None:
    """Return why a tick requested a run, or None."""
    return result.run_requests[0].tags["sr_assets/reason"] if result.run_requests else None


def test_sensor_requests_first_run_and_run_for_unread_messages(rig: Rig, instance: dg.DagsterInstance) -> None:
    stream = rig.make()
    rig.add(stream, target_subject_prefix="c")
    settings = rig.settings()
    assert reason(tick(settings, instance)) == "first run"
    rig.drain()
    idle = tick(settings, instance)
    assert reason(idle) is None
    assert "caught up" in str(idle.skip_reason)
    rig.publish(stream, [Sent(), Sent()])
    assert reason(tick(settings, instance)) == f"{SITE}/{stream}: 2 messages behind"
    # Level-triggered: a request that was lost is repeated.
    assert reason(tick(settings, instance)) == f"{SITE}/{stream}: 2 messages behind"


def test_sensor_requests_run_after_deadline_without_messages(
    rig: Rig, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = rig.make()
    rig.add(stream, target_subject_prefix="c", **TRACKED)
    rig.publish(stream, [Sent(b'{"sender": "web1"}')])
    with monkeypatch.context() as patched:
        # This run never sweeps, so that the deadline passes unnoticed on a slow machine too.
        patched.setattr(NodeStage, "sweep_due", lambda _: False)
        rig.drain()
    settings = rig.settings()
    wait_until(lambda: find_work(settings, SITE)[0] is not None, "the node's deadline to be noticed")
    assert find_work(settings, SITE)[0] == f"{SITE}/{stream}: a node's deadline has passed"
    rig.drain()
    assert [row["event"] for row in rig.rows("SELECT event FROM node_advisories ORDER BY transition")][:2] == [
        "new",
        "timeout",
    ]


def test_first_run_of_feed_waits_for_an_advisory(rig: Rig) -> None:
    feed = rig.make("FEED", rig.target)
    rig.add_feed(feed)
    settings = rig.settings()
    assert find_work(settings, SITE)[0] is None
    rig.publish(feed, [Sent(b"{}")], rig.target)
    assert find_work(settings, SITE)[0] == f"{SITE}/{feed}: first run"


def test_sensor_requests_no_run_while_the_site_is_locked(rig: Rig, instance: dg.DagsterInstance) -> None:
    rig.add(rig.make(), target_subject_prefix="c")
    settings = rig.settings()
    with SiteLock(settings.home / "sites" / SITE, "another run", 0):
        held = tick(settings, instance)
    assert not held.run_requests
    assert "another run" in str(held.skip_reason)
    assert reason(tick(settings, instance)) == "first run"


def test_sensor_requests_no_run_while_one_is_starting(rig: Rig, instance: dg.DagsterInstance) -> None:
    rig.add(rig.make(), target_subject_prefix="c")
    settings = rig.settings()
    job = build(settings).resolve_job_def(site_job_name(settings, SITE))
    instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTING)
    assert "starting" in str(tick(settings, instance).skip_reason)


@pytest.mark.parametrize("is_here", (True, False))
def test_sensor_fails_run_without_process_unless_it_may_be_on_another_host(
    rig: Rig, tmp_path: Path, *, is_here: bool
) -> None:
    rig.add(rig.make(), target_subject_prefix="c")
    settings = rig.settings()
    job = build(settings).resolve_job_def(site_job_name(settings, SITE))
    # The launcher of an ephemeral instance stands for all but the default one.
    opened = dg.DagsterInstance.local_temp(str(tmp_path)) if is_here else dg.DagsterInstance.ephemeral()
    with opened as instance:
        run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
        assert "started" in str(tick(settings, instance).skip_reason)
        # The cursor has the time since when the run lacks its lock; after a minute the run has failed.
        aged = json.dumps({"without_lock": {run.run_id: time.monotonic() - 61}})
        later, ended = tick(settings, instance, aged), instance.get_run_by_id(run.run_id)
        assert ended is not None
        assert ended.is_failure == is_here
        assert reason(later) == "first run" if is_here else "started" in str(later.skip_reason)


def test_run_of_another_launcher_needs_the_home_of_its_sensor(
    rig: Rig, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    """The launcher of an ephemeral instance stands for all but the default one."""
    rig.add(rig.make(), target_subject_prefix="c")
    settings = rig.settings()
    (request,) = tick(settings, instance).run_requests or ()
    job = build(settings).resolve_job_def(site_job_name(settings, SITE))
    tags = {**request.tags, MODE_TAG: "once"}
    assert job.execute_in_process(instance=instance, tags=tags).success
    other = settings.changed(home=tmp_path / "other")
    job = build(other).resolve_job_def(site_job_name(other, SITE))
    result = job.execute_in_process(instance=instance, tags=tags, raise_on_error=False)
    (failure,) = result.get_step_failure_events()
    assert failure.step_failure_data.user_failure_data is not None
    line = str(failure.step_failure_data.user_failure_data.description)
    assert line.startswith(
        f"the home {other.home} of this run is not its sensor's; start runs on the host of the sensor"
    )
    assert not other.home.exists()
    with dg.DagsterInstance.local_temp(str(tmp_path)) as here:
        rig.publish(settings.streams[0].stream, [Sent()])
        (request,) = tick(settings, here).run_requests or ()
        assert HOME_TAG not in request.tags


def observations(result: dg.SensorResult) -> list[dg.AssetObservation]:
    return [event for event in result.asset_events if isinstance(event, dg.AssetObservation)]


def test_sensor_observes_a_changed_source_at_most_once_a_minute(rig: Rig, instance: dg.DagsterInstance) -> None:
    stream = rig.make()
    rig.add(stream, target_subject_prefix="c")
    rig.publish(stream, [Sent(), Sent()])
    settings = rig.settings()
    (entry,) = settings.streams
    first = tick(settings, instance)
    (seen,) = observations(first)
    assert seen.asset_key == stream_key(settings, entry, "source")
    assert {name: seen.metadata[name].value for name in ("last_sequence", "messages", "lag_messages")} == {
        "last_sequence": 2,
        "messages": 2,
        "lag_messages": 2,
    }
    assert "next_sequence" not in seen.metadata
    assert 0 <= float(str(seen.metadata["age_seconds"].value)) < 3600
    rig.drain()
    again = tick(settings, instance, first.cursor)
    assert observations(again) == []
    (seen,) = observations(tick(settings, instance, aged(again.cursor)))
    assert (seen.metadata["next_sequence"].value, seen.metadata["lag_messages"].value) == (3, 0)
    quiet = tick(settings, instance, aged(tick(settings, instance, aged(again.cursor)).cursor))
    assert observations(quiet) == []
    assert "caught up" in str(quiet.skip_reason)


def aged(cursor: str | None) -> str:
    """Return a sensor's cursor as it is two minutes later."""
    seen = json.loads(cursor or "")
    seen["observed"] = {label: [at - 120, numbers] for label, (at, numbers) in seen["observed"].items()}
    return json.dumps(seen)


def test_sensor_observes_its_sources_while_a_run_is_active(rig: Rig, instance: dg.DagsterInstance) -> None:
    stream = rig.make()
    rig.add(stream, target_subject_prefix="c")
    settings = rig.settings()
    with SiteLock(settings.home / "sites" / SITE, "run x", 1.0):
        rig.publish(stream, [Sent()])
        result = tick(settings, instance)
    assert "a run is active" in str(result.skip_reason)
    assert [seen.metadata["last_sequence"].value for seen in observations(result)] == [1]


@pytest.mark.parametrize("cursor", ("x", "[]", "{}", '{"4711": 12.5}'))
def test_sensor_reads_a_foreign_cursor(rig: Rig, instance: dg.DagsterInstance, cursor: str) -> None:
    rig.add(rig.make(), target_subject_prefix="c")
    assert reason(tick(rig.settings(), instance, cursor)) == "first run"


def test_sensor_names_a_change_of_the_configuration_that_no_run_could_load(
    rig: Rig, instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code location has the definitions of the file's earlier content until it is reloaded."""
    stream, file = rig.make(), tmp_path / "changing.yaml"
    site = f"""
        - {{name: {SITE}, stream: {stream}, source_url: {rig.source.url}, target_url: {rig.target.url}, target_subject_prefix: c}}
        """
    other = site.replace(SITE, "OTHER").replace(stream, "ELSEWHERE")

    def write(*sites: str) -> None:
        file.write_text(f"name: {SITE}\nstate_store: {tmp_path / 'home'}\nstreams:\n{''.join(sites)}")

    write(site, other)
    definitions = build(load_settings(file))
    sensor = definitions.resolve_sensor_def(f"{SITE}_lag")

    def outcome() -> str | None:
        with dg.build_sensor_context(instance=instance, definitions=definitions) as context:
            result = sensor(context)
        assert isinstance(result, dg.SensorResult)
        return reason(result) or str(result.skip_reason and result.skip_reason.skip_message)

    assert outcome() == "first run"
    write(other)
    assert outcome() == f"site {SITE} is no longer in {file}; reload this code location"
    write(site, "    {")
    assert "the configuration has changed, and a run could not load it: " in str(outcome())
    write(site)
    file.chmod(0o646)
    assert "every user can write" in str(outcome())
    file.chmod(0o644)
    monkeypatch.setattr(sensors, "_READ_AGAIN_SECONDS", 0.0)
    file.touch()
    assert outcome() == "first run"
    write(site, other)
    file.chmod(0o646)
    assert "every user can write" in str(outcome())
    file.chmod(0o644)
    assert outcome() == "first run", "the same file is not read again"
    file.unlink()
    assert str(file) in str(outcome())
    write(site)
    assert outcome() == "first run"


def test_next_run_restores_a_deleted_fleet_file(rig: Rig, instance: dg.DagsterInstance) -> None:
    rig.add(rig.make(), target_subject_prefix="c")
    rig.drain()
    settings = rig.settings()
    assert find_work(settings, SITE)[0] is None
    (settings.home / "fleet.duckdb").unlink()
    assert find_work(settings, SITE)[0] == "fleet.duckdb lacks this site"
    rig.drain()
    assert find_work(settings, SITE)[0] is None
    assert rig.row("SELECT count(*) AS n FROM replication")["n"] == 1


def test_sensor_requests_run_once_advisories_are_deliverable(rig: Rig, instance: dg.DagsterInstance) -> None:
    stream, feed = rig.make(), rig.unique("FEED")
    advisory = {"subject": f"{feed}.%s.%v", "reliable": True}
    rig.add(stream, target_subject_prefix="c", inspect_field="sender", inspect_duration="1h", advisory=advisory)
    rig.publish(stream, [Sent(b'{"sender": "web1"}')])
    rig.drain()
    settings = rig.settings()
    assert find_work(settings, SITE)[0] is None
    rig.create(feed)
    assert find_work(settings, SITE)[0] == f"{SITE}/{stream}: 1 advisories can be delivered"
    rig.drain()
    assert find_work(settings, SITE)[0] is None
    with cluster(rig.source) as opened:
        assert opened.stream_info(feed).messages == 1


def test_sensor_waits_before_it_retries_refused_advisories(rig: Rig, instance: dg.DagsterInstance) -> None:
    """The stream is full: a run for each tick would only be refused again; new messages are read at once."""
    stream, feed = rig.make(), rig.make("FEED", max_msgs=1, discard="new")
    advisory = {"subject": f"{feed}.%s.%v", "reliable": True}
    rig.add(stream, target_subject_prefix="c", inspect_field="sender", inspect_duration="1h", advisory=advisory)
    rig.publish(stream, [Sent(b'{"sender": "web%d"}' % n) for n in range(3)])
    rig.drain()
    reason, skip = find_work(rig.settings(), SITE)
    assert (reason, skip[: skip.index(" (")]) == (None, f"{SITE}/{stream}: 2 advisories were refused")
    rig.publish(stream, [Sent(b'{"sender": "web9"}')])
    assert find_work(rig.settings(), SITE)[0] == f"{SITE}/{stream}: 1 messages behind"
    rig.api(f"STREAM.UPDATE.{feed}", {"name": feed, "subjects": [f"{feed}.>"], "allow_direct": True, "discard": "new"})
    rig.drain()
    assert find_work(rig.settings(), SITE)[0] is None
    assert rig.info(feed).messages == 4


def test_tick_names_unreachable_sources(rig: Rig, instance: dg.DagsterInstance) -> None:
    stream, missing = rig.make(), rig.unique("MISSING")
    rig.add(stream, target_subject_prefix="c")
    rig.drain()
    rig.add(missing, target_subject_prefix="c")
    assert "does not exist" in find_work(rig.settings(), SITE)[1]
    rig.entries.pop(0)
    with pytest.raises(RunError, match="does not exist"):
        find_work(rig.settings(), SITE)
    skipped = tick(rig.settings(), instance).skip_reason
    assert "does not exist" in str(skipped), "Dagster would log a failed tick with a traceback"


def test_retry_of_failed_stream_is_delayed(rig: Rig) -> None:
    stream, target = rig.make(), rig.unique("T")
    rig.add(stream, target_subject_prefix="c", target_stream=target, no_target_create=True)
    rig.publish(stream, [Sent()])
    assert "no_target_create" in rig.failure()
    work, skip = find_work(rig.settings(), SITE)
    assert work is None
    assert "retry in" in skip


def test_queued_copies_need_a_run_unless_the_stream_is_paused(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, target_subject_prefix="c", inspect_field="sender", inspect_duration="1h")
    rig.drain()
    settings = rig.settings()
    edit_status(settings.home / "sites" / SITE, stream, queued=2)
    assert find_work(settings, SITE) == (f"{SITE}/{stream}: 2 copies are queued", "")
    set_paused(settings, settings.streams[0], paused=True)
    assert find_work(settings, SITE) == (f"{SITE}/{stream}: copying was paused", "")
    edit_status(settings.home / "sites" / SITE, stream, paused=True)
    assert find_work(settings, SITE) == (None, f"{SITE}/{stream}: copying is paused")
    rig.publish(stream, [Sent(b'{"sender": "web1"}')])
    assert find_work(settings, SITE)[0] == f"{SITE}/{stream}: 1 messages behind"


def test_paused_plain_stream_needs_no_run_until_resumed(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, target_subject_prefix="c")
    rig.drain()
    settings = rig.settings()
    rig.publish(stream, [Sent()])
    set_paused(settings, settings.streams[0], paused=True)
    assert find_work(settings, SITE)[0] == f"{SITE}/{stream}: copying was paused"
    rig.drain()
    assert rig.row("replication")["paused"]
    assert find_work(settings, SITE) == (None, f"{SITE}/{stream}: paused")
    set_paused(settings, settings.streams[0], paused=False)
    assert find_work(settings, SITE)[0] == f"{SITE}/{stream}: 1 messages behind"


def test_unreachable_advisory_target_skips_the_tick(rig: Rig) -> None:
    stream = rig.make()
    advisory = {"subject": f"{rig.unique('ADV')}.%s.%v", "reliable": True, "cluster": "target"}
    entry = rig.add(stream, target_subject_prefix="c", inspect_field="sender", inspect_duration="1h", advisory=advisory)
    rig.drain()
    entry["target_url"] = "nats://127.0.0.1:1"
    settings = rig.settings()
    edit_status(settings.home / "sites" / SITE, stream, unpublished=1)
    work, skip = find_work(settings, SITE)
    assert work is None
    assert skip.startswith(f"{SITE}/{stream}: cannot connect to NATS: 127.0.0.1:1")


def next_connection(server: NatsServer) -> int:
    """Return the number of a new connection; the server counts its connections."""
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as opened, opened.makefile("rb") as lines:
        return int(json.loads(lines.readline().removeprefix(b"INFO "))["client_id"])


def test_round_of_sensors_queries_each_server_once(rig: Rig) -> None:
    sites = [f"{SITE}{number}" for number in range(4)]
    streams = [rig.make() for _ in sites]
    for site, stream in zip(sites, streams, strict=True):
        rig.add(stream, name=site, target_subject_prefix="c")
    rig.add(rig.unique("MISSING"), name=sites[0], target_subject_prefix="c")
    for site in sites:
        rig.run(site)
    settings = rig.settings()
    stream_infos = share_stream_infos(settings)

    def tick_all() -> list[str | None]:
        return [find_work(settings, site, stream_infos).reason for site in sites]

    before = next_connection(rig.source)
    assert tick_all() == [None] * 4
    assert next_connection(rig.source) - before == 2, "one connection of the sensors and one of this test"
    rig.publish(streams[3], [Sent()])
    assert tick_all() == [None, None, None, f"{sites[3]}/{streams[3]}: 1 messages behind"]
    rig.drain(sites[3])
    # A response from before the end of the run is not used.
    assert find_work(settings, sites[3], stream_infos).reason is None


def test_cached_stream_info_expires_after_half_an_interval(rig: Rig) -> None:
    stream, other = rig.make(), rig.make()
    for site, name in (("a", stream), ("b", other)):
        rig.add(name, name=site, target_subject_prefix="c")
        rig.drain(site)
    settings = rig.settings(sensor={"interval": "1s"})
    stream_infos = share_stream_infos(settings)
    assert find_work(settings, "a", stream_infos).reason is None
    rig.publish(other, [Sent()])
    queried_at = time.monotonic()
    wait_until(lambda: time.monotonic() > queried_at + 0.5, "the cached stream info to expire")
    assert find_work(settings, "b", stream_infos).reason == f"b/{other}: 1 messages behind"


def test_sensor_of_a_follower_skips_with_its_leader(rig: Rig, instance: dg.DagsterInstance, tmp_path: Path) -> None:
    stream = rig.make()
    rig.add(stream, target_subject_prefix="c")
    bucket = make_bucket(rig)
    first, second = (member(rig, tmp_path, name, bucket) for name in ("a", "b"))
    with Leadership(first, SITE) as leadership:
        leadership.require()
        with Leadership(second, SITE):
            assert str(tick(second, instance).skip_reason).count(leadership.lease.line) == 1
        assert reason(tick(first, instance)) == "first run"
    # Without a process that campaigns for this home, its run does.
    assert reason(tick(second, instance)) == "first run"
