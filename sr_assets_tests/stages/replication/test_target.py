"""Creation of a missing target, and refusal of invalid sources and targets."""

import base64
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.wire import Outgoing
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.settings import StreamSettings
from sr_assets.stages.connectivity import probe_connectivity
from sr_assets.stages.replication.target_setup import create_target, new_target
from sr_assets_tests.adapters.wire.rig import publish
from sr_assets_tests.rig import SITE, Rig, Sent, address, connection, wait_until
from sr_assets_tests.servers import NatsServer


def test_missing_target_is_created_with_only_the_source_limits(rig: Rig) -> None:
    limits: dict[str, Any] = {
        "max_msgs": 1000,
        "max_bytes": 1 << 20,
        "max_age": 3600 * 10**9,
        "max_msgs_per_subject": 7,
        "max_msg_size": 5000,
        "discard": "new",
        "storage": "memory",
        "duplicate_window": 30 * 10**9,
    }
    stream = rig.make(**limits, description="x", deny_delete=True, max_consumers=3, metadata={"a": "b"})
    rig.publish(stream, [Sent(b"x")])
    rig.add(stream, target_subject_prefix="eu")
    rig.drain()
    created = rig.info(stream, rig.target)
    config = created.config
    assert created.subjects == (f"eu.{stream}.>",)
    limits["duplicate_window"] = 120 * 10**9
    # A copy is larger than its original.
    limits["max_msg_size"] = -1
    assert {key: config[key] for key in limits} == limits
    assert created.allow_direct
    assert not config.get("deny_delete")
    assert "description" not in config
    assert config.get("max_consumers", -1) == -1
    assert config["num_replicas"] == 1


def test_target_is_created_with_every_key_of_its_block(rig: Rig) -> None:
    stream = rig.make(max_msgs=1000, max_bytes=1 << 20, max_age=60 * 10**9, max_msgs_per_subject=7)
    rig.publish(stream, [Sent(b"x")])
    subjects = [f"eu.{stream}.>", f"more.{stream}"]
    block = {
        "subjects": subjects,
        "storage": "memory",
        "retention": "interest",
        "replicas": 1,
        "max_age": "unlimited",
        "max_bytes": -1,
        "max_msgs": 500,
        "max_msgs_per_subject": "unlimited",
        "max_msg_size": "2MiB",
        "discard": "new",
        "duplicate_window": "7m",
        "compression": "none",
        "allow_direct": False,
        "deny_delete": True,
        "deny_purge": True,
    }
    rig.add(stream, target_subject_prefix="eu", target=block)
    rig.drain()
    config = rig.info(stream, rig.target).config
    assert sorted(config["subjects"]) == sorted(subjects)
    expected = {"storage": "memory", "retention": "interest", "num_replicas": 1, "max_msgs": 500, "discard": "new"}
    expected |= {"max_age": 0, "max_bytes": -1, "max_msgs_per_subject": -1, "max_msg_size": 2 << 20}
    expected |= {"duplicate_window": 7 * 60 * 10**9, "deny_delete": True, "deny_purge": True, "allow_direct": False}
    assert {key: config.get(key) for key in expected} == expected
    assert config.get("compression", "none") == "none"
    assert [probe.learned for probe in probe_connectivity(rig.settings()) if not probe.works] == []


def test_target_is_created_with_the_other_values_of_each_key(rig: Rig) -> None:
    stream = rig.make(storage="memory", max_msgs=9, discard="new", max_age=60 * 10**9)
    rig.publish(stream, [Sent(b"x")])
    block = {"storage": "file", "retention": "limits", "replicas": 1, "discard": "old", "compression": "s2"}
    block |= {"max_age": -1, "max_bytes": "1GiB", "max_msgs": 0, "max_msgs_per_subject": 3, "max_msg_size": "unlimited"}
    block |= {"duplicate_window": "3m", "allow_direct": True, "deny_delete": False, "deny_purge": False}
    rig.add(stream, target=block)
    rig.drain()
    config = rig.info(stream, rig.target).config
    expected = {"storage": "file", "retention": "limits", "num_replicas": 1, "discard": "old", "compression": "s2"}
    expected |= {"max_age": 0, "max_bytes": 1 << 30, "max_msgs": -1, "max_msgs_per_subject": 3, "max_msg_size": -1}
    expected |= {"duplicate_window": 180 * 10**9, "allow_direct": True, "deny_delete": False, "deny_purge": False}
    assert {key: config.get(key, False) for key in expected} == expected
    assert [probe.learned for probe in probe_connectivity(rig.settings()) if not probe.works] == []


def test_asynchronous_target_has_one_replica_on_files(rig: Rig) -> None:
    stream, other = rig.make(storage="memory"), rig.make()
    for name, block in ((stream, {"persist": "async"}), (other, None)):
        rig.publish(name, [Sent(b"x")])
        rig.add(name, **({"target": block} if block else {}))
    rig.drain()
    config = rig.info(stream, rig.target).config
    assert (config["persist_mode"], config["storage"], config["num_replicas"]) == ("async", "file", 1)
    rig.entries[1]["target"] = {"persist": "async"}
    (failed,) = [probe.learned for probe in probe_connectivity(rig.settings()) if not probe.works]
    assert failed == f"target stream {other} has persist default, wanted async; change it, or the block target"


def test_check_names_each_key_that_drifts(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(b"x")])
    rig.add(stream, target={"max_age": "1h", "compression": "s2", "deny_purge": False, "max_msgs": "unlimited"})
    rig.drain()
    rig.entries[0]["target"] = {"max_age": "2h", "compression": "none", "deny_purge": True, "max_msgs": 8}
    failed = [probe.learned for probe in probe_connectivity(rig.settings()) if not probe.works]
    drift = (
        "max_age 3600s, wanted 7200s; max_msgs unlimited, wanted 8; compression s2, wanted none; deny_purge False,"
        " wanted True"
    )
    assert failed == [f"target stream {stream} has {drift}; change it, or the block target"]


@pytest.mark.parametrize(
    ("block", "expected"),
    (
        ({"subjects": ["elsewhere.>"]}, "target.subjects elsewhere.> do not include"),
        (
            {"duplicate_window": "5m", "max_msgs": 5},
            "the block target sets duplicate_window 300s; change it, or omit it for the source's value",
        ),
    ),
)
def test_refused_key_of_a_new_target_is_named(rig: Rig, block: dict[str, Any], expected: str) -> None:
    stream = rig.make(max_age=60 * 10**9)
    rig.publish(stream, [Sent(b"x")])
    rig.add(stream, target=block)
    assert expected in rig.failure()


def test_new_target_with_unknown_subjects_requires_a_setting(rig: Rig) -> None:
    """The origin is in another account."""
    mirror = rig.info(rig.make())
    foreign = {"name": "ELSEWHERE", "external": {"api": "$JS.hub.API"}}
    mirror = replace(mirror, config={**mirror.config, "subjects": [], "mirror": foreign})
    urls = dict.fromkeys(("source_url", "target_url"), "127.0.0.1:4222")
    stream = StreamSettings.model_validate({"stream": mirror.stream, "target_stream": "COPY", **urls})
    with Cluster(address(rig.source)) as source:
        with pytest.raises(RunError, match="set filter_subject or target_subject_prefix"):
            new_target(stream, mirror, source)
        filtered = stream.changed(filter_subject="a.b", prefix="p")
        assert new_target(filtered, mirror, source)["subjects"] == ["p.a.b"]
        assert new_target(stream.changed(prefix="p"), mirror, source)["subjects"] == ["p.>"]


def make_transformed(rig: Rig) -> tuple[str, list[str]]:
    """Make a stream with its own subject, one source and transforms of both; return it and its stored subjects."""
    origin, stream = rig.make("ORIGIN"), rig.unique("MIXED")
    config = {
        "subjects": [f"{stream}.in.*.*"],
        "subject_transform": {"src": f"{stream}.in.*.*", "dest": f"{stream}.out.{{{{wildcard(2)}}}}"},
        "sources": [{"name": origin, "subject_transforms": [{"src": f"{origin}.>", "dest": f"of.{origin}.>"}]}],
    }
    rig.create(stream, rig.source, **config)
    rig.publish(origin, [Sent(b"1")])
    rig.api(f"STREAM.INFO.{origin}")
    with connection(rig.source) as opened:
        publish(opened, [Outgoing(1, f"{stream}.in.a.b", b"", b"2"), Outgoing(2, f"{stream}.in.c.d", b"", b"3")])
    wait_until(lambda: rig.info(stream).messages == 3, "the source's message")
    return stream, sorted([f"of.{origin}.>", f"{stream}.out.*"])


@pytest.mark.parametrize("mirrored", (False, True), ids=("transformed", "mirrored"))
def test_new_target_accepts_transformed_subjects_and_full_size(rig: Rig, mirrored: bool) -> None:
    stream, stored = make_transformed(rig)
    if mirrored:
        mirror = rig.unique("MIRROR")
        rig.api(f"STREAM.CREATE.{mirror}", {"name": mirror, "mirror": {"name": stream}})
        wait_until(lambda: rig.info(mirror).messages == 3, "the mirror's messages")
        stream = mirror
    rig.add(stream)
    rig.drain()
    assert sorted(copy.payload for copy in rig.copies(stream)) == [b"1", b"2", b"3"]
    assert sorted(rig.info(stream, rig.target).subjects) == stored
    assert rig.row("replication")["parked_messages"] == 0


def test_largest_message_of_a_limited_source_is_copied(rig: Rig) -> None:
    stream = rig.make(max_msg_size=5000)
    rig.publish(stream, [Sent(b"x" * 5000)])
    rig.add(stream)
    rig.drain()
    assert [len(copy.payload) for copy in rig.copies(stream)] == [5000]


@pytest.mark.parametrize(
    ("config", "expected"),
    (
        ({"max_msg_size": 5000}, "has max_msg_size 5000, but a copy can have"),
        ({"subjects": ["{}.a"]}, "does not take {}.b: it would refuse the copies of 1 of 2 subjects"),
    ),
)
def test_check_fails_for_a_target_that_would_refuse_a_copy(rig: Rig, config: dict[str, Any], expected: str) -> None:
    stream, target = rig.make(), rig.unique("T")
    rig.publish(stream, [Sent(b"1", "b"), Sent(b"2", "a")])
    subjects = [subject.format(stream) for subject in config.get("subjects", ["{}.>"])]
    rig.create(target, rig.target, **{**config, "subjects": subjects})
    rig.add(stream, target_stream=target)
    failed = [probe.learned for probe in probe_connectivity(rig.settings()) if not probe.works]
    assert len(failed) == 1
    assert expected.format(stream) in failed[0]


def test_entries_with_disjoint_filters_share_a_target(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Neither entry takes the other's copies for copies of its own messages."""
    stream, target = rig.make(), rig.unique("T")
    rig.publish(stream, [Sent(b"1", "a.x"), Sent(b"2", "b.x")])
    for part in ("a", "b"):
        rig.add(stream, name=part, filter_subject=f"{stream}.{part}.*", target_stream=target)
    rig.create(target, rig.target, subjects=[f"{stream}.>"])
    for _ in range(2):
        for part in ("a", "b"):
            rig.drain(part)
        assert [probe for probe in probe_connectivity(rig.settings()) if not probe.works] == []
    assert sorted(copy.payload for copy in rig.copies(target)) == [b"1", b"2"]
    assert "copies of the same source" not in caplog.text


def test_no_target_create_fails_on_a_missing_target(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(b"x")])
    rig.add(stream, no_target_create=True)
    failure = rig.failure()
    assert stream in failure
    assert "no_target_create" in failure
    rig.create(stream, rig.target)
    rig.drain()
    assert len(rig.copies(stream)) == 1


@pytest.mark.parametrize("retention", ("workqueue", "interest"))
def test_source_with_consuming_retention_is_refused(rig: Rig, retention: str) -> None:
    stream = rig.make(retention=retention)
    rig.add(stream)
    assert retention in rig.failure()


@pytest.mark.parametrize(
    ("config", "expected"),
    (({"no_ack": True}, "no_ack"), ({"sealed": True}, "sealed"), ({"subjects": ["other.x"]}, "add")),
)
def test_target_that_cannot_accept_copies_is_refused(rig: Rig, config: dict[str, Any], expected: str) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(b"x")])
    name = rig.unique("T")
    if "subjects" in config:
        config = {"subjects": [f"{name}.other"]}
    sealed = config.get("sealed")
    rig.create(name, rig.target, **({} if sealed else {"subjects": [f"{stream}.>"], **config}))
    if sealed:
        rig.api(f"STREAM.UPDATE.{name}", {**rig.info(name, rig.target).config, "sealed": True}, rig.target)
    rig.add(stream, target_stream=name)
    failure = rig.failure()
    assert expected in failure
    assert name in failure
    assert not rig.copies(name)


def test_mirror_as_target_is_refused(rig: Rig) -> None:
    stream, origin = rig.make(), rig.make("M", rig.target)
    mirror = rig.unique("MIRROR")
    response = rig.api(f"STREAM.CREATE.{mirror}", {"name": mirror, "mirror": {"name": origin}}, rig.target)
    assert "error" not in response
    rig.publish(stream, [Sent(b"x")])
    rig.add(stream, target_stream=mirror)
    assert "mirror" in rig.failure()


def test_missing_source_stream_fails_with_its_name(rig: Rig) -> None:
    name = rig.unique("MISSING")
    rig.add(name)
    assert name in rig.failure()


def test_unreachable_server_fails_with_its_address_and_no_password(rig: Rig) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        reachable = rig.make()
        rig.publish(reachable, [Sent(b"x")])
        rig.add("ANY", source_url=f"nats://me:hunter2@{address}")
        rig.add(reachable)
        reports = rig.run()
    failure = reports["ANY"].failure
    assert failure is not None
    assert address in failure
    assert "hunter2" not in failure
    assert "\n" not in failure
    assert reports[reachable].failure is None
    assert len(rig.copies(reachable)) == 1


@pytest.mark.parametrize("side", ("source", "target"))
def test_denied_login_or_permission_fails_without_the_password(rig: Rig, tmp_path: Path, side: str) -> None:
    users = (
        '{user: all, password: "s3cret"}, {user: few, password: "s3cret", '
        'permissions: {publish: {allow: ["_INBOX.>", "$JS.API.INFO"]}, subscribe: ">"}}'
    )
    with NatsServer(tmp_path, "guarded", config=f"authorization {{ users: [{users}] }}") as guarded:
        stream = rig.make()
        rig.publish(stream, [Sent(b"x")])
        for login, expected in (("few:s3cret", "ermission"), ("all:wr0ng", "uthorization")):
            rig.entries.clear()
            rig.add(stream, **{f"{side}_url": f"nats://{login}@{guarded.address}"})
            failure = rig.failure()
            assert expected in failure
            assert "s3cret" not in failure
            assert "wr0ng" not in failure


def test_target_block_creates_the_target_and_reports_later_drift(rig: Rig) -> None:
    stream = rig.make(max_msgs=50)
    rig.publish(stream, [Sent(b"x")])
    entry = rig.add(stream, target={"storage": "memory", "max_age": "1d", "max_msgs": 1000})
    (report,) = rig.drain().values()
    created = rig.info(stream, rig.target)
    assert (created.config["storage"], created.config["max_age"], created.config["max_msgs"]) == (
        "memory",
        86_400 * 10**9,
        1000,
    )
    assert report.target_drift == []
    entry["target"] |= {"max_age": "2d", "replicas": 3}
    rig.publish(stream, [Sent(b"y")])
    (report,) = rig.drain().values()
    assert report.target_drift == ["replicas 1, wanted 3", "max_age 86400s, wanted 172800s"]
    assert rig.info(stream, rig.target).config == created.config
    failed = [probe.learned for probe in probe_connectivity(rig.settings()) if not probe.works]
    assert failed == [f"target stream {stream} has {'; '.join(report.target_drift)}; change it, or the block target"]


def test_subject_overlap_error_names_the_subject_and_the_remedy(rig: Rig) -> None:
    stream, conflicting = rig.make(), rig.unique("TAKEN")
    rig.create(conflicting, rig.target)
    rig.add(stream, target_subject_prefix=conflicting)
    (settings,) = rig.settings().streams
    with (
        Cluster(settings.target) as target,
        pytest.raises(RunError, match=rf"another stream there takes {conflicting}\.{stream}\.>; set another"),
    ):
        create_target(settings, rig.info(stream), target, target)


def test_target_on_the_source_server_with_same_subjects_is_refused(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(b"x")])
    rig.add(stream, target_url=rig.source.url, target_stream=rig.unique("T"))
    with pytest.raises(ConfigurationError, match="overlap"):
        rig.settings()
    # Another spelling of the same server is detected only on connecting.
    rig.entries[0] |= {"target_url": f"nats://[::ffff:127.0.0.1]:{rig.source.port}", "target_stream": stream}
    before = rig.info(stream)
    assert "same stream" in rig.failure()
    assert rig.info(stream).last_sequence == before.last_sequence


def test_advisories_into_the_tracked_stream_are_refused(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(b'{"sender": "a"}')])
    rig.add(stream, inspect_field="sender", inspect_duration="1h", advisory={"subject": f"{stream}.adv.%s.%v"})
    assert "advisory.subject" in rig.failure()
    assert rig.info(stream).last_sequence == 1
    assert "advisory.subject" in rig.row("replication")["last_error"]


def test_older_state_finds_its_copies_in_a_work_queue(rig: Rig) -> None:
    """A work queue permits no consumer that only reads."""
    stream, site = rig.make(), rig.home / "sites" / SITE
    rig.publish(stream, [Sent(b"1"), Sent(b"2")])
    rig.add(stream, target={"retention": "workqueue", "duplicate_window": "100ms"})
    rig.drain()
    shutil.copytree(site, older := rig.home / "older")
    rig.publish(stream, [Sent(b"3"), Sent(b"4")])
    rig.drain()
    shutil.rmtree(site)
    older.rename(site)
    rig.publish(stream, [Sent(b"5")])
    rig.drain()
    queued = [rig.api(f"STREAM.MSG.GET.{stream}", {"seq": n}, rig.target)["message"]["data"] for n in range(1, 6)]
    assert queued == [base64.b64encode(b"%d" % n).decode() for n in range(1, 6)]
    assert rig.info(stream, rig.target).last_sequence == 5
    assert [probe.learned for probe in probe_connectivity(rig.settings()) if not probe.works] == []
