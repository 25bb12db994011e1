"""A leader that is killed or suspended: another member leads, and the old leader commits and sends nothing more."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sr_assets.adapters.crash_points import Point
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.state.lease import Lease
from sr_assets.adapters.state.store import SiteState
from sr_assets.stages.leadership import Leadership
from sr_assets.stages.report import Stage
from sr_assets.stages.run import run_site
from sr_assets.stages.site import Site
from sr_assets_tests.faults.holding import hold_at
from sr_assets_tests.faults.rig import await_marker
from sr_assets_tests.forks import Forked
from sr_assets_tests.members import elected, end_lease, expire, key_of, make_bucket, member, read_key, write_key
from sr_assets_tests.rig import PATIENCE_SECONDS, SITE, Rig, Sent, cluster, leave_out_due_work, stop_process, wait_until

#: More than a writer sends at a time, so that a held writer has not sent all of them.
MESSAGES = [Sent(b"x" * 7000)] * 300


@pytest.fixture
def target(rig: Rig) -> str:
    """Configure a plain stream with messages; return its target."""
    stream, target = rig.make(), rig.unique("TARGET")
    rig.publish(stream, MESSAGES)
    rig.add(stream, target_stream=target, target_subject_prefix=target)
    return target


def start_leader(rig: Rig, bucket: str, point: Point, marker: Path) -> subprocess.Popen[str]:
    """Start a run of the member `a` in the rig's home, and hold it at a checkpoint."""
    with pytest.MonkeyPatch.context() as environment:
        for name, text in hold_at(point, marker).items():
            environment.setenv(name, text)
        return rig.start(**elected("a", bucket))


def copies(rig: Rig, target: str) -> int:
    """Return the number of messages that a target has stored."""
    with cluster(rig.target) as opened:
        info = opened.find_stream(target)
    return info.last_sequence if info else 0


@pytest.mark.parametrize(
    "point",
    (
        Point.PUBLISHING,
        # Simulated histories reach them in each gate.
        *(pytest.param(each, marks=pytest.mark.nightly) for each in (Point.PLANNED, Point.PUBLISHED, Point.COMMITTING)),
    ),
)
def test_frozen_leader_commits_and_sends_nothing_when_it_wakes_up(
    rig: Rig, tmp_path: Path, target: str, point: Point
) -> None:
    bucket, marker = make_bucket(rig), tmp_path / "held"
    leader = start_leader(rig, bucket, point, marker)
    held_pid = await_marker(leader, marker)
    stop_process(held_pid)
    try:
        with Leadership(member(rig, tmp_path, "b", bucket), SITE) as other:
            end_lease(rig.home)
            expire(rig, bucket)
            wait_until(lambda: other.leads, "the other member to lead")
            before = copies(rig, target)
            marker.write_text("released")
            os.kill(held_pid, signal.SIGCONT)
            stdout, stderr = leader.communicate(timeout=PATIENCE_SECONDS)
            assert (leader.returncode, stdout) == (0, "[]\n"), stderr
            assert "this member no longer leads" in stderr
            assert copies(rig, target) == before
            assert other.leads
    finally:
        leader.kill()
    with SiteState(rig.home / "sites" / SITE) as state:
        stream = rig.entries[0]["stream"]
        assert state.load_copying(stream).copied_messages == 0
        assert state.open_intent(stream) is not None


def test_key_that_a_third_party_deleted_is_led_after_the_old_deadline(rig: Rig, tmp_path: Path, target: str) -> None:
    """A Stream Replicator deletes the key when it ends, even as a follower of a leader that is frozen."""
    bucket, marker = make_bucket(rig), tmp_path / "held"
    leader = start_leader(rig, bucket, Point.PUBLISHING, marker)
    try:
        stop_process(await_marker(leader, marker))
        key = key_of(rig.entries[0]["stream"])
        assert write_key(rig, bucket, key, "", revision=None, KV_Operation="DEL")
        with Leadership(member(rig, tmp_path, "b", bucket), SITE) as other:
            assert read_key(rig, bucket, key) == b"b"
            waits = "this member will lead when the lease of a on "
            wait_until(lambda: other.lease.line.startswith(waits), "the old deadline to be what the member waits for")
            end_lease(rig.home)
            expire(rig, bucket, "sr_assets.>")
            wait_until(lambda: other.leads, "the other member to lead")
    finally:
        leader.kill()
        leader.communicate()


def test_another_member_leads_after_the_leader_was_killed(rig: Rig, tmp_path: Path, target: str) -> None:
    """The server expires the keys."""
    bucket, marker = make_bucket(rig, 2), tmp_path / "held"
    leader = start_leader(rig, bucket, Point.PUBLISHING, marker)
    await_marker(leader, marker)
    with Leadership(member(rig, tmp_path, "b", bucket), SITE) as other:
        leader.kill()
        leader.communicate()
        wait_until(lambda: other.leads, "the other member to lead")


def test_restarted_home_continues_its_own_term(rig: Rig, tmp_path: Path, target: str) -> None:
    bucket, marker = make_bucket(rig), tmp_path / "held"
    leader = start_leader(rig, bucket, Point.PUBLISHING, marker)
    await_marker(leader, marker)
    before = Lease.read(rig.home / "sites" / SITE)
    leader.kill()
    leader.communicate()
    settings = rig.settings(**elected("a", bucket))
    with Leadership(settings, SITE) as leadership:
        # Without a wait for the expiry of its own keys.
        assert (leadership.leads, leadership.lease.since_ns) == (True, before.since_ns)


def run_member(file: Path, mode: str) -> subprocess.Popen[str]:
    """Start `sr-assets run` with a configuration, without the hourly and nightly jobs."""
    leave_out_due_work(file.parent)
    environ = {**os.environ, "SR_ASSETS_CONFIG": str(file)}
    for name in ("DAGSTER_HOME", "SR_ASSETS_HOME"):
        environ.pop(name, None)
    command = [sys.executable, "-W", "ignore", "-m", "sr_assets", "run", mode]
    return Forked(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_run_once_of_a_follower_names_the_leader(rig: Rig, tmp_path: Path, target: str) -> None:
    bucket = make_bucket(rig)
    with Leadership(member(rig, tmp_path, "a", bucket), SITE) as leadership:
        leadership.require()
        settings = member(rig, tmp_path, "b", bucket)
        follower = run_member(settings.home / "replication.yaml", "--once")
        stdout, stderr = follower.communicate(timeout=PATIENCE_SECONDS)
        assert (follower.returncode, stdout) == (0, f"{leadership.lease.line}\n"), stderr
        assert " leads since " not in stderr, "the line is printed once"
    assert not (settings.home / "sites" / SITE / "state.duckdb").exists()
    assert copies(rig, target) == 0


def test_run_follow_stands_by_and_takes_over(rig: Rig, tmp_path: Path, target: str) -> None:
    bucket = make_bucket(rig)
    settings = member(rig, tmp_path, "b", bucket)
    with Leadership(member(rig, tmp_path, "a", bucket), SITE) as leadership:
        leadership.require()
        line = leadership.lease.line
        follower = run_member(settings.home / "replication.yaml", "--follow")
        assert follower.stdout is not None
        try:
            assert follower.stdout.readline() == f"{line}\n"
        except BaseException:
            follower.kill()
            raise
    try:
        wait_until(lambda: copies(rig, target) == len(MESSAGES), "the follower to copy")
    finally:
        follower.send_signal(signal.SIGTERM)
        stdout, stderr = follower.communicate(timeout=PATIENCE_SECONDS)
    assert (stdout.count(" leads since "), follower.returncode) == (0, 0), stderr


@pytest.mark.parametrize("mode", ("--once", "--follow"))
def test_follower_shows_the_checkpoint(rig: Rig, tmp_path: Path, target: str, mode: str) -> None:
    bucket = make_bucket(rig)
    first, second = (member(rig, tmp_path, name, bucket) for name in ("a", "b"))
    with Leadership(first, SITE) as leadership:
        leadership.require()
        with Site(first, SITE, owner="test", run_id="test") as site:
            run_site(site, {entry.stream: frozenset(Stage) for entry in site.entries}, drain_only=True)
        follower = run_member(second.home / "replication.yaml", mode)
        try:
            wait_until((second.home / "fleet.duckdb").exists, "the follower to publish")
            if mode == "--follow":
                follower.send_signal(signal.SIGTERM)
            stdout, stderr = follower.communicate(timeout=PATIENCE_SECONDS)
        finally:
            follower.kill()
        assert (follower.returncode, stdout) == (0, f"{leadership.lease.line}\n"), stderr
    with open_fleet(second.home) as fleet:
        shown = fleet.execute("SELECT role, leader, copied_messages FROM snapshot_info, replication").fetchall()
    assert shown == [("follower", "a", len(MESSAGES))]


@pytest.mark.parametrize(
    "point",
    (
        Point.PUBLISHED,
        *(pytest.param(each, marks=pytest.mark.nightly) for each in (Point.FOLDED, Point.PLANNED, Point.COMMITTED)),
    ),
)
def test_empty_home_takes_over_exactly(rig: Rig, tmp_path: Path, point: Point) -> None:
    """The leader is killed in the middle of its work; the other member has only the leader's last checkpoint."""
    bucket, stream = make_bucket(rig), rig.make()
    feed, target = rig.make("FEED"), rig.unique("TARGET")
    rig.add(
        stream,
        target_stream=target,
        target_subject_prefix=target,
        inspect_field="sender",
        inspect_duration="10h",
        size_trigger=1,
        advisory={"subject": f"{feed}.%s.%v", "reliable": True},
    )
    rig.publish(stream, reports(1, 30))
    rig.drain(**elected("a", bucket))
    rig.publish(stream, reports(30, 60))
    marker = tmp_path / "held"
    leader = start_leader(rig, bucket, point, marker)
    await_marker(leader, marker)
    leader.kill()
    leader.communicate()
    expire(rig, bucket)
    settings = member(rig, tmp_path, "b", bucket)
    with Leadership(settings, SITE) as other:
        wait_until(lambda: other.leads, "the other member to lead")
        with Site(settings, SITE, owner="test", run_id="test") as site:
            assert site.state.load_stream(stream) is not None, "no checkpoint was restored"
            outcome = run_site(site, {stream: frozenset(Stage)}, drain_only=True)[stream]
    assert outcome.failure is None
    made = [json.loads(copy.payload)["n"] for copy in rig.copies(target)]
    assert sorted(made) == sorted(set(made))
    announced = [json.loads(message.payload)["value"] for message in rig.stored(feed)]
    announced = [node for node in announced if node]
    assert sorted(announced) == sorted(f"n{node}" for node in range(7))
    single = Rig(fresh(tmp_path / "single"), rig.source, rig.target, rig.unique, entries=[dict(rig.entries[0])])
    alone = rig.unique("ALONE")
    del single.entries[0]["advisory"]
    single.entries[0] |= {"target_stream": alone, "target_subject_prefix": alone}
    single.drain()
    assert made == [json.loads(copy.payload)["n"] for copy in single.copies(alone)]


def reports(first: int, after: int) -> list[Sent]:
    bodies = [{"sender": f"n{n % 7}", "n": n, "pad": "x" * (n % 3)} for n in range(first, after)]
    return [Sent(json.dumps(body).encode()) for body in bodies]


def fresh(folder: Path) -> Path:
    folder.mkdir()
    return folder
