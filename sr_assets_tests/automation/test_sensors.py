"""The lag sensor over several ticks, on real servers and a real instance: when it asks for a run, and why it does not."""

import json
import socket
import time
from collections.abc import Iterator

import dagster as dg
import pytest

from sr_assets.adapters.state.lock import SiteLock
from sr_assets.adapters.state.pausing import set_paused
from sr_assets.automation import find_work, share_stream_infos, site_job_name
from sr_assets.definitions import build
from sr_assets.domain.errors import RunError
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.settings import Settings
from sr_assets.stages.tracking.node_state import NodeStage
from sr_assets_tests.rig import SITE, Rig, Sent, cluster, wait_until

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
    """Return why a tick asked for a run."""
    return result.run_requests[0].tags["sr_assets/reason"] if result.run_requests else None


def test_a_site_is_run_at_first_then_when_its_source_is_ahead_and_not_when_it_is_caught_up(
    rig: Rig, instance: dg.DagsterInstance
) -> None:
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
    # Level-triggered: a run that was asked for and never came is asked for again.
    assert reason(tick(settings, instance)) == f"{SITE}/{stream}: 2 messages behind"


def test_a_run_is_asked_for_when_a_deadline_has_passed_although_nothing_arrives(
    rig: Rig, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = rig.make()
    rig.add(stream, target_subject_prefix="c", **TRACKED)
    rig.publish(stream, [Sent(b'{"sender": "web1"}')])
    with monkeypatch.context() as patched:
        # However slow this machine is, the deadline passes unnoticed: this run ends before it sweeps.
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


def test_a_feed_is_run_at_first_when_there_is_something_to_fold(rig: Rig) -> None:
    feed = rig.make("FEED", rig.target)
    rig.add_feed(feed)
    settings = rig.settings()
    assert find_work(settings, SITE)[0] is None
    rig.publish(feed, [Sent(b"{}")], rig.target)
    assert find_work(settings, SITE)[0] == f"{SITE}/{feed}: first run"


def test_no_run_is_asked_for_while_one_holds_the_site(rig: Rig, instance: dg.DagsterInstance) -> None:
    rig.add(rig.make(), target_subject_prefix="c")
    settings = rig.settings()
    with SiteLock(settings.home / "sites" / SITE, "somebody", 0):
        held = tick(settings, instance)
    assert not held.run_requests
    assert "somebody" in str(held.skip_reason)
    assert reason(tick(settings, instance)) == "first run"


def test_no_run_is_asked_for_while_one_is_starting_and_one_without_a_process_is_failed(
    rig: Rig, instance: dg.DagsterInstance
) -> None:
    rig.add(rig.make(), target_subject_prefix="c")
    settings = rig.settings()
    job = build(settings).resolve_job_def(site_job_name(SITE))
    run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTING)
    assert "starting" in str(tick(settings, instance).skip_reason)
    instance.delete_run(run.run_id)
    run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    first = tick(settings, instance)
    assert "started" in str(first.skip_reason)
    # The cursor says since when it has been without its lock; a minute later it counts as gone.
    aged = (
        first.cursor.replace(first.cursor.split(": ")[1].rstrip("}"), str(time.monotonic() - 61))
        if first.cursor
        else ""
    )
    assert reason(tick(settings, instance, aged)) == "first run"
    failed = instance.get_run_by_id(run.run_id)
    assert failed is not None
    assert failed.status is dg.DagsterRunStatus.FAILURE


def test_a_deleted_fleet_file_is_mended_by_the_next_run(rig: Rig, instance: dg.DagsterInstance) -> None:
    rig.add(rig.make(), target_subject_prefix="c")
    rig.drain()
    settings = rig.settings()
    assert find_work(settings, SITE)[0] is None
    (settings.home / "fleet.duckdb").unlink()
    assert find_work(settings, SITE)[0] == "fleet.duckdb lacks this site"
    rig.drain()
    assert find_work(settings, SITE)[0] is None
    assert rig.row("SELECT count(*) AS n FROM replication")["n"] == 1


def test_advisories_that_no_stream_took_are_tried_again_once_one_does(rig: Rig, instance: dg.DagsterInstance) -> None:
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


def test_lag_is_tolerated_as_configured(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, target_subject_prefix="c")
    rig.drain()
    patient = rig.settings(sensor={"lag_messages": 3})
    rig.publish(stream, [Sent(), Sent()])
    assert find_work(patient, SITE)[0] is None
    rig.publish(stream, [Sent()])
    assert find_work(patient, SITE)[0] == f"{SITE}/{stream}: 3 messages behind"


def test_a_tick_says_when_no_source_can_be_asked(rig: Rig, instance: dg.DagsterInstance) -> None:
    good, gone = rig.make(), rig.unique("GONE")
    rig.add(good, target_subject_prefix="c")
    rig.drain()
    rig.add(gone, target_subject_prefix="c")
    assert "does not exist" in find_work(rig.settings(), SITE)[1]
    rig.entries.pop(0)
    with pytest.raises(RunError, match="does not exist"):
        find_work(rig.settings(), SITE)
    skipped = tick(rig.settings(), instance).skip_reason
    assert "does not exist" in str(skipped), "a tick that fails would be logged with a trace"


def test_a_failing_stream_is_tried_again_ever_more_patiently(rig: Rig) -> None:
    stream, target = rig.make(), rig.unique("T")
    rig.add(stream, target_subject_prefix="c", target_stream=target, no_target_create=True)
    rig.publish(stream, [Sent()])
    assert "no_target_create" in rig.failure()
    work, skip = find_work(rig.settings(), SITE)
    assert work is None
    assert "tried again in" in skip


def edit_status(settings: Settings, stream: str, **values: object) -> None:
    """Change what the last run wrote of a stream."""
    file = settings.home / "sites" / SITE / "status.json"
    status = json.loads(file.read_text())
    status["streams"][stream] |= values
    file.write_text(json.dumps(status))


def test_queued_copies_are_a_reason_to_run_unless_the_stream_is_paused(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, target_subject_prefix="c", inspect_field="sender", inspect_duration="1h")
    rig.drain()
    settings = rig.settings()
    edit_status(settings, stream, queued=2)
    assert find_work(settings, SITE) == (f"{SITE}/{stream}: 2 copies are queued", "")
    set_paused(settings, settings.streams[0], paused=True)
    assert find_work(settings, SITE) == (None, f"{SITE}/{stream}: copying is paused")
    rig.publish(stream, [Sent(b'{"sender": "web1"}')])
    assert find_work(settings, SITE)[0] == f"{SITE}/{stream}: 1 messages behind"


def test_a_paused_stream_that_copies_what_it_reads_is_left_alone_until_it_is_resumed(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, target_subject_prefix="c")
    rig.drain()
    settings = rig.settings()
    rig.publish(stream, [Sent()])
    set_paused(settings, settings.streams[0], paused=True)
    assert find_work(settings, SITE) == (None, f"{SITE}/{stream}: paused")
    set_paused(settings, settings.streams[0], paused=False)
    assert find_work(settings, SITE)[0] == f"{SITE}/{stream}: 1 messages behind"


def test_a_target_that_is_away_while_its_advisories_wait_is_a_note_and_no_failed_tick(rig: Rig) -> None:
    stream = rig.make()
    advisory = {"subject": f"{rig.unique('ADV')}.%s.%v", "reliable": True, "cluster": "target"}
    entry = rig.add(stream, target_subject_prefix="c", inspect_field="sender", inspect_duration="1h", advisory=advisory)
    rig.drain()
    entry["target_url"] = "nats://127.0.0.1:1"
    settings = rig.settings()
    edit_status(settings, stream, unpublished=1)
    work, skip = find_work(settings, SITE)
    assert work is None
    assert skip.startswith(f"{SITE}/{stream}: cannot connect to NATS: 127.0.0.1:1")


def next_connection(server: NatsServer) -> int:
    """Return the number of a new connection: a server counts them."""
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as opened, opened.makefile("rb") as lines:
        return int(json.loads(lines.readline().removeprefix(b"INFO "))["client_id"])


def test_a_round_of_many_quiet_sites_asks_each_server_once_and_the_next_round_sees_what_came(rig: Rig) -> None:
    sites = [f"{SITE}{number}" for number in range(4)]
    streams = [rig.make() for _ in sites]
    for site, stream in zip(sites, streams, strict=True):
        rig.add(stream, name=site, target_subject_prefix="c")
    rig.add(rig.unique("GONE"), name=sites[0], target_subject_prefix="c")
    for site in sites:
        rig.run(site)
    settings = rig.settings()
    survey = share_stream_infos(settings)

    def tick_all() -> list[str | None]:
        return [find_work(settings, site, survey).reason for site in sites]

    before = next_connection(rig.source)
    assert tick_all() == [None] * 4
    assert next_connection(rig.source) - before == 2, "one of ours, one of this test's"
    rig.publish(streams[3], [Sent()])
    assert tick_all() == [None, None, None, f"{sites[3]}/{streams[3]}: 1 messages behind"]
    rig.drain(sites[3])
    # What was asked before the run ended is not believed.
    assert find_work(settings, sites[3], survey).reason is None


def test_a_look_serves_no_longer_than_half_an_interval(rig: Rig) -> None:
    stream, other = rig.make(), rig.make()
    for site, name in (("a", stream), ("b", other)):
        rig.add(name, name=site, target_subject_prefix="c")
        rig.drain(site)
    settings = rig.settings(sensor={"interval": "1s"})
    survey = share_stream_infos(settings)
    assert find_work(settings, "a", survey).reason is None
    rig.publish(other, [Sent()])
    asked_at = time.monotonic()
    wait_until(lambda: time.monotonic() > asked_at + 0.5, "the look to be too old")
    assert find_work(settings, "b", survey).reason == f"b/{other}: 1 messages behind"
