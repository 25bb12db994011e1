"""Leadership of a site: one member leads, the others stand by, and nothing is committed or sent without the lease."""

import contextlib
import errno
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sr_assets.adapters import times
from sr_assets.adapters.private import write_private
from sr_assets.adapters.state.lease import Lease
from sr_assets.domain.errors import LeadershipLostError, RunError, StandbyError
from sr_assets.settings import Settings
from sr_assets.stages.leadership import Leadership, lead_all, standby_line, step_down
from sr_assets.stages.report import Stage
from sr_assets.stages.run import run_site
from sr_assets.stages.site import Site
from sr_assets_tests.members import (
    TTL_SECONDS,
    bucket_config,
    expire,
    key_of,
    make_bucket,
    member,
    read_key,
    write_key,
)
from sr_assets_tests.rig import SITE, Rig, Sent, wait_until

HOST = socket.gethostname()
TOO_NEW = "this member will lead when the bucket is older than its TTL"


@pytest.fixture
def stream(rig: Rig) -> str:
    name = rig.make()
    rig.add(name, target_stream=rig.unique("T"), target_subject_prefix=rig.unique("copy"))
    return name


@pytest.fixture
def bucket(rig: Rig) -> str:
    return make_bucket(rig)


@contextlib.contextmanager
def leading(settings: Settings) -> Iterator[Leadership]:
    """Enter an election and wait until this member leads."""
    with Leadership(settings, SITE) as leadership:
        leadership.require()
        yield leadership


def state_files(settings: Settings) -> set[str]:
    return {path.name for path in (settings.home / "sites" / SITE).glob("*state*")}


def test_one_member_leads_and_names_itself(rig: Rig, tmp_path: Path, stream: str, bucket: str) -> None:
    first, second = (member(rig, tmp_path, name, bucket) for name in ("a", "b"))
    with leading(first) as leader, Leadership(second, SITE) as follower:
        assert read_key(rig, bucket, key_of(stream)) == b"a"
        assert not follower.leads
        assert follower.lease.line == leader.lease.line
        assert leader.lease.line.startswith(f"a on {HOST} leads since 20")
        assert standby_line(first, SITE) is None
        assert standby_line(second, SITE) == follower.lease.line
        with pytest.raises(StandbyError, match=rf"^a on {HOST} leads since "):
            follower.require()
    assert standby_line(second, SITE) is None
    assert read_key(rig, bucket, key_of(stream)) is None


def test_follower_changes_nothing(rig: Rig, tmp_path: Path, stream: str, bucket: str) -> None:
    rig.publish(stream, [Sent()])
    first, second = (member(rig, tmp_path, name, bucket) for name in ("a", "b"))
    with leading(first):
        with pytest.raises(StandbyError, match=rf"^a on {HOST}"), Site(second, SITE, owner="test", run_id="test"):
            pass
        assert state_files(second) == set()
        with Site(first, SITE, owner="test", run_id="test") as site:
            reports = run_site(site, {stream: frozenset(Stage)}, drain_only=True)
        assert reports[stream].copied == 1


def test_next_member_leads_after_the_end_of_the_first(rig: Rig, tmp_path: Path, stream: str, bucket: str) -> None:
    first, second = (member(rig, tmp_path, name, bucket) for name in ("a", "b"))
    with contextlib.ExitStack() as stack:
        with leading(first):
            follower = stack.enter_context(Leadership(second, SITE))
        wait_until(lambda: follower.leads, "the follower to lead")
        assert read_key(rig, bucket, key_of(stream)) == b"b"


def test_next_member_leads_after_the_process_of_the_first_hangs(rig: Rig, tmp_path: Path, stream: str) -> None:
    """The server expires the keys, and the first member's lease has ended by then."""
    bucket = make_bucket(rig, 2)
    first, second = (member(rig, tmp_path, name, bucket) for name in ("a", "b"))
    with leading(first) as leader, Leadership(second, SITE) as follower:
        leader._thread.stop()

        def has_succeeded() -> bool:
            leads = follower.leads
            assert not (leads and leader.leads)
            return leads

        wait_until(has_succeeded, "the follower to lead")


def test_renewal_of_a_stream_replicator_does_not_change_its_term(
    rig: Rig, tmp_path: Path, stream: str, bucket: str
) -> None:
    assert write_key(rig, bucket, key_of(stream), "go-1")
    with Leadership(member(rig, tmp_path, "a", bucket), SITE) as leadership:
        assert leadership.lease.line.startswith("go-1 leads since 20")
        before = leadership.lease
        assert write_key(rig, bucket, key_of(stream), "go-1", revision=None)
        campaigns = before.campaigns["candidate"] + 2
        wait_until(lambda: leadership.lease.campaigns["candidate"] >= campaigns, "another campaign")
        assert (leadership.lease.leader, leadership.lease.since_ns) == ("go-1", before.since_ns)


def test_expired_key_of_a_stream_replicator_is_taken(rig: Rig, tmp_path: Path, stream: str, bucket: str) -> None:
    with Leadership(member(rig, tmp_path, "a", bucket), SITE) as leadership:
        write_key(rig, bucket, key_of(stream), "go-1", revision=None)
        wait_until(lambda: leadership.lease.leader == "go-1", "the Stream Replicator to lead")
        expire(rig, bucket, key_of(stream))
        wait_until(lambda: leadership.leads, "this member to lead")
        assert write_key(rig, bucket, key_of(stream), "go-1") is None


def test_taken_key_ends_the_leadership(rig: Rig, tmp_path: Path, stream: str, bucket: str) -> None:
    """A Stream Replicator deletes the key when it ends, also as a follower; another one may then take it."""
    rig.publish(stream, [Sent()])
    with leading(member(rig, tmp_path, "a", bucket)) as leadership:
        settings = member(rig, tmp_path, "a", bucket)
        with Site(settings, SITE, owner="test", run_id="test") as site:
            write_key(rig, bucket, key_of(stream), "", revision=None, KV_Operation="DEL")
            write_key(rig, bucket, key_of(stream), "go-2", revision=None)
            wait_until(lambda: not leadership.leads, "the leader to notice")
            with pytest.raises(LeadershipLostError, match=f"^{SITE}: this member no longer leads"):
                leadership.ensure()
            with pytest.raises(LeadershipLostError), site.state.transaction():
                raise AssertionError("began a transaction")
            reports = run_site(site, {stream: frozenset(Stage)}, drain_only=True)
        assert (reports[stream].copied, reports[stream].failure) == (0, None)
        wait_until(lambda: leadership.lease.leader == "go-2", "the follower to name the leader")


def test_all_keys_are_released_if_one_is_held(rig: Rig, tmp_path: Path, stream: str, bucket: str) -> None:
    other = rig.make()
    rig.add(other, target_stream=rig.unique("T"), target_subject_prefix=rig.unique("copy"))
    later, earlier = sorted((key_of(stream), key_of(other)), reverse=True)
    assert write_key(rig, bucket, later, "go-1")
    with Leadership(member(rig, tmp_path, "a", bucket), SITE) as leadership:
        assert leadership.lease.leader == "go-1"
        assert read_key(rig, bucket, earlier) is None
        expire(rig, bucket, later)
        wait_until(lambda: leadership.leads, "both keys")
        assert read_key(rig, bucket, later) == read_key(rig, bucket, earlier) == b"a"


def test_two_members_with_two_entries_never_lead_both(rig: Rig, tmp_path: Path, stream: str, bucket: str) -> None:
    other = rig.make()
    rig.add(other, target_stream=rig.unique("T"), target_subject_prefix=rig.unique("copy"))
    first, second = (member(rig, tmp_path, name, bucket) for name in ("a", "b"))
    with Leadership(first, SITE) as left, Leadership(second, SITE) as right:
        wait_until(lambda: left.leads or right.leads, "a leader")
        leader, follower = (left, right) if left.leads else (right, left)
        wait_until(lambda: follower.leads or leader.lease.campaigns.get("leader", 0) > 3, "renewals")
        assert (leader.leads, follower.leads) == (True, False)


def test_step_down_lets_the_other_lead_and_rests(rig: Rig, tmp_path: Path, stream: str, bucket: str) -> None:
    first, second = (member(rig, tmp_path, name, bucket) for name in ("a", "b"))
    with leading(first) as leader, Leadership(second, SITE) as follower:
        assert not step_down(second, SITE, 10)
        assert step_down(first, SITE, 10)
        assert not leader.leads
        wait_until(lambda: follower.leads, "the follower to lead")
        campaigns = leader.lease.campaigns
        wait_until(lambda: leader.lease.leader == "b", "the former leader to name the new one")
        assert leader.lease.campaigns == campaigns
    # It rests for two TTLs in a new process too.
    rig.travel(seconds=1.5 * TTL_SECONDS)
    with Leadership(first, SITE) as leader:
        assert not leader.leads
        assert leader.lease.campaigns == campaigns
        rig.travel(seconds=TTL_SECONDS)
        wait_until(lambda: leader.leads, "the end of the rest")


def test_service_campaigns_when_a_run_of_its_home_has_ended(rig: Rig, tmp_path: Path, stream: str, bucket: str) -> None:
    settings = member(rig, tmp_path, "a", bucket)
    with contextlib.ExitStack() as stack:
        with leading(settings) as run:
            stack.enter_context(lead_all(settings))
            assert run.campaigns
        wait_until(lambda: run.lease.holds, "the service to lead")


def test_full_disk_ends_no_campaigns(
    rig: Rig,
    tmp_path: Path,
    stream: str,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    failures: list[object] = []

    def fail(lease: Lease, _: object) -> None:
        failures.append(lease)
        raise OSError(errno.ENOSPC, "No space left on device")

    with leading(member(rig, tmp_path, "a", bucket)) as leadership:
        with monkeypatch.context() as full:
            full.setattr(Lease, "write", fail)
            rig.travel(seconds=TTL_SECONDS)
            assert not leadership.leads
            wait_until(lambda: len(failures) > 2, "some failed campaigns")
            assert "cannot be written (No space left on device); free some space" in caplog.text
        wait_until(lambda: leadership.leads, "a term after space was freed")


def test_member_on_a_full_disk_lets_the_other_lead(
    rig: Rig, tmp_path: Path, stream: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds no keys without a lease, and campaigns again after space was freed."""
    first, second = (member(rig, tmp_path, name, bucket) for name in ("a", "b"))

    def write(file: Path, text: str, *, durable: bool) -> None:
        if file.is_relative_to(first.home):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_private(file, text, durable=durable)

    with leading(first) as leader, contextlib.ExitStack() as stack:
        with monkeypatch.context() as full:
            full.setattr("sr_assets.adapters.state.lease.write_private", write)
            rig.travel(seconds=TTL_SECONDS)
            with Leadership(second, SITE) as follower:
                wait_until(lambda: follower.leads, "the other member to lead")
                assert not leader.leads
                with pytest.raises(StandbyError):
                    leader.require()
            assert not (first.home / "sites" / SITE / "leader.json").exists()
            stack.enter_context(Leadership(second, SITE))
        wait_until(lambda: "leads since" in leader.lease.line or leader.leads, "a campaign after space was freed")
        stack.close()
        wait_until(lambda: leader.leads, "a term after the other member ended")


def test_deleted_bucket_ends_the_term_and_is_created_again(rig: Rig, tmp_path: Path, stream: str, bucket: str) -> None:
    settings = member(rig, tmp_path, "a", bucket)
    with leading(settings) as leadership:
        rig.api(f"STREAM.DELETE.KV_{bucket}")
        wait_until(lambda: TOO_NEW in leadership.lease.line, "the member to create the bucket")
        assert not leadership.leads
        rig.travel(minutes=1)
        wait_until(lambda: leadership.leads, "a term in a new bucket")


def test_lease_follows_the_ttl_of_a_bucket_that_was_created_again(
    rig: Rig, tmp_path: Path, stream: str, bucket: str
) -> None:
    """The keys in a bucket with a shorter TTL expire earlier; the connection is still open."""
    with leading(member(rig, tmp_path, "a", bucket)) as leadership:

        def create_again() -> bool:
            # Between the two requests the member may create it with its default TTL.
            rig.api(f"STREAM.DELETE.KV_{bucket}")
            return "error" not in rig.api(f"STREAM.CREATE.KV_{bucket}", bucket_config(bucket, 30))

        wait_until(create_again, "the bucket to be created again")
        wait_until(lambda: TOO_NEW in leadership.lease.line, "the leader to notice")
        rig.travel(seconds=TTL_SECONDS)
        wait_until(lambda: leadership.leads, "a term in the new bucket")
        assert leadership.lease.ttl_seconds == 30
        assert leadership.lease.deadline < times.boot_seconds() + 30


@pytest.mark.parametrize(("seconds", "shown"), ((0.5, "a TTL of 0.5 s"), (7200, "a TTL of 7200 s"), (0, "no TTL")))
def test_bucket_with_a_wrong_ttl_is_refused(rig: Rig, tmp_path: Path, stream: str, seconds: float, shown: str) -> None:
    bucket = make_bucket(rig, seconds)
    with pytest.raises(RunError, match=rf"bucket {bucket} has {shown}; leader election needs 1 s to 1 h: ") as raised:
        Leadership(member(rig, tmp_path, "a", bucket), SITE, patient=True).__enter__()
    assert "\n" not in str(raised.value)
    assert not Lease.read(tmp_path / "a" / "sites" / SITE).holds


def test_missing_bucket_is_created(rig: Rig, tmp_path: Path, stream: str) -> None:
    bucket = rig.unique("NEW")
    with Leadership(member(rig, tmp_path, "a", bucket), SITE) as leadership:
        config = rig.info(f"KV_{bucket}").config
        assert (config["max_age"], config["num_replicas"]) == (10**10, 1)
        assert not leadership.leads
        assert TOO_NEW in leadership.lease.line
        rig.travel(minutes=1)
        wait_until(lambda: leadership.leads, "the bucket to be older than its TTL")


def test_site_without_a_member_name_has_no_election(rig: Rig, stream: str) -> None:
    with Leadership(rig.settings(), SITE) as leadership:
        assert leadership.leads
        leadership.ensure()
    assert not (rig.home / "sites" / SITE / "leader.json").exists()


def test_sockets_of_publishers_drop_late_data(
    rig: Rig, tmp_path: Path, stream: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel drops copies and advisories that a server has not acknowledged within a TTL."""
    limits: list[int] = []
    set_option = socket.socket.setsockopt

    def note(opened: socket.socket, level: int, option: int, value: int) -> None:
        if (level, option) == (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT):
            limits.append(value)
        set_option(opened, level, option, value)

    rig.publish(stream, [Sent()])
    settings = member(rig, tmp_path, "a", bucket)
    with leading(settings), Site(settings, SITE, owner="test", run_id="test") as site:
        monkeypatch.setattr(socket.socket, "setsockopt", note)
        client = site.clusters.connect(site.streams[0].source)
        assert client.max_payload
        assert limits.pop() == TTL_SECONDS * 1000
        assert run_site(site, {stream: frozenset(Stage)}, drain_only=True)[stream].copied == 1
    assert TTL_SECONDS * 1000 in limits
