"""The contract of an election's bucket, on a real server and on the simulated one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import NamedTuple

import pytest

from sr_assets.adapters.lease_bucket import LeaseBucket
from sr_assets.domain.clusters import ClusterSettings
from sr_assets_tests.members import TTL_SECONDS, bucket_config, expire, make_bucket
from sr_assets_tests.rig import SITE, Rig, address, wait_until
from sr_assets_tests.sim.streams import SECOND_NS, Stream
from sr_assets_tests.sim.tcp import TcpServer

REAL = pytest.param("real", marks=pytest.mark.process)
#: As `real`, but keys expire by the server's own clock.
REAL_TTL = pytest.param("real ttl", marks=pytest.mark.process)


class Pair(NamedTuple):
    """Two members' connections to one bucket, and what lets its keys expire."""

    first: LeaseBucket
    second: LeaseBucket
    expire: Callable[[], None]


@pytest.fixture(params=("simulated", REAL))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with ExitStack() as stack:
        if request.param == "simulated":
            tcp = stack.enter_context(TcpServer())
            cluster, bucket, server = ClusterSettings((tcp.address,)), "ELECTION", tcp.server
            now_ns, ttl_ns = server.clock, int(TTL_SECONDS * SECOND_NS)
            server.streams[f"KV_{bucket}"] = Stream(bucket_config(bucket), now_ns() - 2 * ttl_ns)

            def pass_ttl() -> None:
                server.clock = lambda: now_ns() + ttl_ns
        else:
            rig: Rig = request.getfixturevalue("rig")
            cluster, bucket = address(rig.source), make_bucket(rig, 1 if request.param == "real ttl" else TTL_SECONDS)

            def pass_ttl() -> None:
                if request.param == "real":
                    expire(rig, bucket)
                wait_until(lambda: rig.info(f"KV_{bucket}").messages == 0, "the keys to expire")

        first, second = (stack.enter_context(closing(LeaseBucket(cluster, bucket, name))) for name in ("one", "two"))
        yield Pair(first, second, pass_ttl)


def test_free_key_is_created_once(pair: Pair) -> None:
    revision, before = pair.first.create("a", "north")
    assert revision is not None
    assert before is None
    refused, holder = pair.second.create("a", "south")
    assert refused is None
    assert holder is not None
    assert (holder.value, holder.revision, holder.instance, holder.deleted) == ("north", revision, "one", False)
    assert pair.second.read("a") == holder
    assert pair.second.read("b") is None


def test_key_is_written_by_its_revision(pair: Pair) -> None:
    created, _ = pair.first.create("a", "north")
    assert pair.second.put({"a": ("south", 0)}) == [None]
    (renewed,) = pair.first.put({"a": ("north", created)})
    assert renewed is not None
    assert created is not None
    assert renewed > created
    assert pair.first.put({"a": ("north", created)}) == [None]
    assert not pair.first.delete("a", created)
    (taken,) = pair.second.put({"a": ("south", None)})
    entry = pair.first.read("a")
    assert entry is not None
    assert (entry.value, entry.revision, entry.instance) == ("south", taken, "two")


def test_refused_value_has_no_revision(pair: Pair) -> None:
    created = {key: pair.first.create(key, "north")[0] for key in "abc"}
    pair.second.put({"b": ("south", None)})
    renewed = pair.first.put({key: ("north", revision) for key, revision in created.items()})
    assert [revision is None for revision in renewed][:2] == [False, True]
    for key, revision in zip("abc", renewed, strict=True):
        entry = pair.first.read(key)
        assert entry is not None
        assert (entry.instance, entry.revision == (revision or created[key])) == (
            "two" if key == "b" else "one",
            key != "b",
        )


def test_deleted_key_names_who_deleted_it(pair: Pair) -> None:
    created, _ = pair.first.create("a", "north")
    assert pair.first.delete("a", created)
    revision, before = pair.second.create("a", "south")
    assert revision is not None
    assert before is not None
    assert (before.deleted, before.instance, before.expired) == (True, "one", False)


@pytest.mark.parametrize("pair", ("simulated", REAL, REAL_TTL), indirect=True)
def test_expired_keys_leave_nothing(pair: Pair) -> None:
    pair.first.create("a", "north")
    pair.first.put({"b": ("north", None)})
    pair.first.delete("b", None)
    pair.first.keep_record(SITE, {"role": "leader"})
    pair.expire()
    assert [pair.second.read(key) for key in "ab"] == [None, None]
    assert pair.second.records(SITE) == {}
    revision, before = pair.second.create("a", "south")
    assert revision is not None
    assert before is None


def test_records_are_of_instances(pair: Pair) -> None:
    for bucket, role in ((pair.first, "leader"), (pair.second, "follower")):
        bucket.keep_record(SITE, {"role": role})
    pair.first.keep_record("PARIS", {"role": "candidate"})
    assert pair.second.records(SITE) == {"one": {"role": "leader"}, "two": {"role": "follower"}}
    pair.first.forget_record(SITE)
    assert pair.second.records(SITE) == {"two": {"role": "follower"}}
    assert pair.second.record(SITE, "one") is None
    assert pair.second.record("PARIS", "one") == {"role": "candidate"}


def test_bucket_is_older_than_its_ttl(pair: Pair) -> None:
    assert pair.first.age_seconds() > pair.first.ttl_seconds == TTL_SECONDS
