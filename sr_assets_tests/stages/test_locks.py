"""Locks: one run at a time holds them, they outlive no killed holder, and a lost one ends the work before its next commit."""

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.adapters import times
from sr_assets.adapters.bucket import Entry, KeyBucket
from sr_assets.adapters.lease_bucket import sound_name, sound_record
from sr_assets.domain.errors import LeadershipLostError, RunError
from sr_assets.settings import Settings
from sr_assets.stages.campaign import lock_lease
from sr_assets.stages.locks import Locks
from sr_assets.stages.site import Site
from sr_assets_tests.members import expire
from sr_assets_tests.rig import SITE, Rig, Sent, address, wait_until
from sr_assets_tests.sourced import kv, make_data_bucket


@pytest.fixture
def stream(rig: Rig) -> str:
    name = rig.make()
    rig.add(name, target_stream=rig.unique("T"), target_subject_prefix=rig.unique("copy"))
    return name


@pytest.fixture
def bucket(rig: Rig, stream: str) -> str:
    return make_data_bucket(rig)


def top(rig: Rig, bucket: str, **more: Any) -> dict[str, Any]:
    keys = {"data": {"ops": kv(rig, bucket)}, "locks": ["ops/maintenance"], "lock_ttl": "1m", "lock_timeout": "0s"}
    return {**keys, **more}


def homes(rig: Rig, folder: Path, document: dict[str, Any]) -> tuple[Settings, Settings]:
    """Return the same configuration for two homes."""
    settings = rig.settings(**document)
    return settings.changed(home=folder / "a"), settings.changed(home=folder / "b")


@pytest.fixture
def keys(rig: Rig, bucket: str) -> Iterator[KeyBucket]:
    with contextlib.closing(KeyBucket(address(rig.source), bucket, client="test")) as opened:
        yield opened


def test_lock_names_its_holder_and_frees_itself_at_the_end(
    rig: Rig, keys: KeyBucket, bucket: str, tmp_path: Path
) -> None:
    first, second = homes(rig, tmp_path, top(rig, bucket))
    with Site(first, SITE, owner="test", run_id="r1"):
        entry = keys.read("lock.maintenance")
        assert entry is not None
        value = json.loads(entry.value)
        assert value["holder"].startswith(f"{SITE}/{SITE} on {socket.gethostname()} (pid ")
        text = rf"^{SITE}: lock ops/maintenance: {re.escape(value['holder'])} holds ops/maintenance since 20[^;]*; waited 0s"
        with pytest.raises(RunError, match=text), Site(second, SITE, owner="test", run_id="r2"):
            pass
    with Site(second, SITE, owner="test", run_id="r2"):
        pass


def test_run_waits_for_the_end_of_the_holder(rig: Rig, bucket: str, tmp_path: Path) -> None:
    first, second = homes(rig, tmp_path, top(rig, bucket, lock_timeout="1h"))
    holder = Locks(first, SITE, "r1")
    with holder:
        holder.acquired()
        waiting = Locks(second, SITE, "r2")
        waiting.__enter__()
        assert not waiting.campaign.leads
    try:
        wait_until(lambda: waiting.campaign.leads, "the waiting run to hold the lock")
    finally:
        waiting.__exit__()


def test_lock_of_a_killed_holder_expires(rig: Rig, keys: KeyBucket, bucket: str, stream: str, tmp_path: Path) -> None:
    rig.publish(stream, [Sent()])
    # The server expires the lock.
    holder = rig.start(**top(rig, bucket, lock_ttl="2s", linger="1h"))
    try:
        wait_until(lambda: keys.read("lock.maintenance") is not None, "the run to take the lock")
    finally:
        holder.kill()
        holder.communicate()
    _, second = homes(rig, tmp_path, top(rig, bucket, lock_timeout="1h"))
    with Site(second, SITE, owner="test", run_id="r2") as site:
        assert site.leadership.leads


def test_lost_lock_ends_the_run_before_its_next_commit(rig: Rig, keys: KeyBucket, bucket: str, stream: str) -> None:
    rig.publish(stream, [Sent()])
    with rig.open(**top(rig, bucket)) as site:
        keys.put({"lock.maintenance": ("another program", None)})
        locks = site.leadership.locks
        assert locks is not None
        wait_until(lambda: locks.lease.leader == "another program", "the run to notice that its lock was taken")
        text = f"^{SITE}: the run lost its lock .another program holds ops/maintenance since 20"
        with pytest.raises(LeadershipLostError, match=text), site.state.transaction():
            pass
        with pytest.raises(LeadershipLostError, match=text):
            site.leadership.ensure()


def test_suspended_holder_commits_nothing_after_its_deadline(rig: Rig, bucket: str, tmp_path: Path) -> None:
    first, _ = homes(rig, tmp_path, top(rig, bucket))
    locks = Locks(first, SITE, "r1")
    with locks:
        locks.acquired()
        # Before the server expires the lock.
        assert locks.campaign.lease.deadline < times.boot_seconds() + 60
        locks.campaign._thread.stop()  # the thread renews no more, as in a suspended process
        rig.travel(minutes=1)
        with pytest.raises(LeadershipLostError):
            locks.campaign.ensure()


def test_run_does_not_start_without_its_lock(rig: Rig, keys: KeyBucket, bucket: str, stream: str) -> None:
    rig.publish(stream, [Sent()])
    keys.put({"lock.maintenance": ("deploy 17", None)})
    with pytest.raises(
        RunError, match=r"lock ops/maintenance: deploy 17 holds .*sr-assets data delete ops/lock.maintenance"
    ):
        rig.run(**top(rig, bucket))
    expire(rig, bucket)
    (report,) = rig.run(**top(rig, bucket)).values()
    assert report.copied == 1


def test_lock_that_was_deleted_by_hand_is_held_a_ttl_later(
    rig: Rig, keys: KeyBucket, bucket: str, tmp_path: Path
) -> None:
    """Its former holder may hang until then."""
    keys.put({"lock.maintenance": ("deploy 17", None)})
    keys.delete("lock.maintenance", None)
    first, _ = homes(rig, tmp_path, top(rig, bucket, lock_timeout="1h"))
    with Locks(first, SITE, "r1") as locks:
        assert not locks.campaign.leads
        assert locks.campaign.lease.line == "an earlier holder may still work"
        rig.travel(minutes=1)
        assert locks.acquired()


def test_bucket_without_per_message_ttl_is_refused(rig: Rig, stream: str) -> None:
    bucket = make_data_bucket(rig, per_message_ttl=False)
    text = (
        f"^{SITE}: lock ops/maintenance: .*bucket {bucket} does not allow a TTL per message.* edit KV_{bucket} --allow"
    )
    with pytest.raises(RunError, match=text):
        rig.run(**top(rig, bucket))


def test_missing_bucket_of_a_lock_is_refused(rig: Rig, stream: str) -> None:
    with pytest.raises(RunError, match="bucket NONE of the locks does not exist; create it: nats kv add NONE"):
        rig.run(**top(rig, "NONE"))


def test_entry_may_have_other_locks(rig: Rig, keys: KeyBucket, bucket: str, stream: str) -> None:
    rig.entries[0]["locks"] = ["ops/deploy"]
    with rig.open(**top(rig, bucket)):
        assert keys.read("lock.maintenance") is None
        assert keys.read("lock.deploy") is not None
    rig.entries[0]["locks"] = []
    with rig.open(**top(rig, bucket)) as site:
        assert site.leadership.locks is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300) | st.just("\ud800\x1b[2J\n"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
SINCE = VALUES | st.just("0001-01-01T00:00:00+23:59") | st.just("9999-12-31T23:59:59-23:59")


@given(
    st.text(max_size=300)
    | st.fixed_dictionaries({"holder": VALUES, "since": SINCE}).map(json.dumps)
    | VALUES.map(json.dumps)
    | st.just("[" * 100_000)
)
def test_any_value_of_a_lock_names_a_holder_in_one_short_line(value: str) -> None:
    lease = lock_lease(Entry(value, 1, 7, None, False))
    assert lease.leader is not None
    assert lease.leader.isprintable()
    assert 0 < len(lease.leader) <= 1_000
    assert type(lease.since_ns) is int
    assert 0 <= lease.since_ns < 1 << 63


@given(st.text(max_size=2_000))
def test_any_value_of_an_election_key_is_one_short_name(value: str) -> None:
    assert sound_name(value).isprintable()
    assert len(sound_name(value)) <= 255 * 10


@given(VALUES | st.dictionaries(st.sampled_from(("member", "host", "role", "since_ns")), VALUES))
def test_any_record_of_a_member_has_short_texts_and_numbers_of_a_table(value: object) -> None:
    for each in (sound_record(value) or {}).values():
        if isinstance(each, str):
            assert each.isprintable()
            assert len(each) <= 255 * 10
        else:
            assert 0 <= each < 1 << 63
