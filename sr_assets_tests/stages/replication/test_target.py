"""Sources and targets that cannot be right are refused in one line; a missing target is made."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.settings import StreamSettings
from sr_assets.stages.connectivity import probe_connectivity
from sr_assets.stages.replication.target import create_target, new_target
from sr_assets_tests.rig import Rig, Sent


def test_a_missing_target_is_made_with_the_sources_limits_and_nothing_else(rig: Rig) -> None:
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
    made = rig.info(stream, rig.target)
    config = made.config
    assert made.subjects == (f"eu.{stream}.>",)
    limits["duplicate_window"] = 120 * 10**9
    assert {key: config[key] for key in limits} == limits
    assert made.allow_direct
    assert not config.get("deny_delete")
    assert "description" not in config
    assert config.get("max_consumers", -1) == -1
    assert config["num_replicas"] == 1


def test_a_mirror_without_a_filter_needs_a_target_made_by_hand(rig: Rig) -> None:
    mirror = replace(rig.info(rig.make()), subjects=())
    here = ClusterSettings(("127.0.0.1:4222",))
    stream = StreamSettings(
        name="site", stream=mirror.stream, source=here, replicator="sr", target=here, target_stream="COPY"
    )
    with pytest.raises(RunError, match="filter_subject"):
        new_target(stream, mirror)
    assert new_target(replace(stream, filter_subject="a.b", prefix="p"), mirror)["subjects"] == ["p.a.b"]


def test_a_missing_target_is_not_made_when_that_is_not_wanted(rig: Rig) -> None:
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
def test_a_source_whose_messages_go_when_read_is_refused(rig: Rig, retention: str) -> None:
    stream = rig.make(retention=retention)
    rig.add(stream)
    assert retention in rig.failure()


@pytest.mark.parametrize(
    ("config", "said"), (({"no_ack": True}, "no_ack"), ({"sealed": True}, "sealed"), ({"subjects": ["other.x"]}, "add"))
)
def test_a_target_that_cannot_confirm_or_take_the_copies_is_refused(
    rig: Rig, config: dict[str, Any], said: str
) -> None:
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
    assert said in failure
    assert name in failure
    assert not rig.copies(name)


def test_a_target_that_is_a_mirror_is_refused(rig: Rig) -> None:
    stream, origin = rig.make(), rig.make("M", rig.target)
    mirror = rig.unique("MIRROR")
    answer = rig.api(f"STREAM.CREATE.{mirror}", {"name": mirror, "mirror": {"name": origin}}, rig.target)
    assert "error" not in answer
    rig.publish(stream, [Sent(b"x")])
    rig.add(stream, target_stream=mirror)
    assert "mirror" in rig.failure()


def test_a_stream_that_is_missing_is_one_line_with_its_name(rig: Rig) -> None:
    name = rig.unique("MISSING")
    rig.add(name)
    assert name in rig.failure()


def test_a_server_that_does_not_answer_is_one_line_with_its_address_and_without_the_password(rig: Rig) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        other = rig.make()
        rig.publish(other, [Sent(b"x")])
        rig.add("ANY", source_url=f"nats://me:hunter2@{address}")
        rig.add(other)
        reports = rig.run()
    failure = reports["ANY"].failure
    assert failure is not None
    assert address in failure
    assert "hunter2" not in failure
    assert "\n" not in failure
    assert reports[other].failure is None
    assert len(rig.copies(other)) == 1


@pytest.mark.parametrize("side", ("source", "target"))
def test_wrong_credentials_and_missing_permissions_are_one_line(rig: Rig, tmp_path: Path, side: str) -> None:
    users = (
        '{user: all, password: "s3cret"}, {user: few, password: "s3cret", '
        'permissions: {publish: {allow: ["_INBOX.>", "$JS.API.INFO"]}, subscribe: ">"}}'
    )
    with NatsServer(tmp_path, "guarded", config=f"authorization {{ users: [{users}] }}") as guarded:
        stream = rig.make()
        rig.publish(stream, [Sent(b"x")])
        for login, said in (("few:s3cret", "ermission"), ("all:wr0ng", "uthorization")):
            rig.entries.clear()
            rig.add(stream, **{f"{side}_url": f"nats://{login}@{guarded.address}"})
            failure = rig.failure()
            assert said in failure
            assert "s3cret" not in failure
            assert "wr0ng" not in failure


def test_a_target_is_made_as_it_is_wanted_and_later_differences_are_shown_and_not_changed(rig: Rig) -> None:
    stream = rig.make(max_msgs=50)
    rig.publish(stream, [Sent(b"x")])
    entry = rig.add(stream, target={"storage": "memory", "max_age": "1d", "max_msgs": 1000})
    (report,) = rig.drain().values()
    made = rig.info(stream, rig.target)
    assert (made.config["storage"], made.config["max_age"], made.config["max_msgs"]) == ("memory", 86_400 * 10**9, 1000)
    assert report.target_drift == []
    entry["target"] |= {"max_age": "2d", "replicas": 3}
    rig.publish(stream, [Sent(b"y")])
    (report,) = rig.drain().values()
    assert report.target_drift == ["num_replicas 1, wanted 3", "max_age 86400s, wanted 172800s"]
    assert rig.info(stream, rig.target).config == made.config
    failed = [probe.learned for probe in probe_connectivity(rig.settings()) if not probe.works]
    assert failed == [f"target stream {stream} has {'; '.join(report.target_drift)}; change it, or the block target"]


def test_subjects_that_another_stream_takes_are_named_with_what_to_do(rig: Rig) -> None:
    stream, taken = rig.make(), rig.unique("TAKEN")
    rig.create(taken, rig.target)
    rig.add(stream, target_subject_prefix=taken)
    (settings,) = rig.settings().streams
    with (
        Cluster(settings.target) as target,
        pytest.raises(RunError, match=rf"another stream there takes {taken}\.{stream}\.>; set another"),
    ):
        create_target(settings, rig.info(stream), target)


def test_a_target_on_the_source_that_takes_the_same_subjects_is_refused(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(b"x")])
    rig.add(stream, target_url=rig.source.url, target_stream=rig.unique("T"))
    with pytest.raises(ConfigurationError, match="overlap"):
        rig.settings()
    # Another spelling of the same server is only noticed when it is asked.
    rig.entries[0] |= {"target_url": f"nats://[::ffff:127.0.0.1]:{rig.source.port}", "target_stream": stream}
    before = rig.info(stream)
    assert "same stream" in rig.failure()
    assert rig.info(stream).last_sequence == before.last_sequence


def test_advisories_into_the_tracked_stream_itself_are_refused(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, [Sent(b'{"sender": "a"}')])
    rig.add(stream, inspect_field="sender", inspect_duration="1h", advisory={"subject": f"{stream}.adv.%s.%v"})
    assert "advisory.subject" in rig.failure()
    assert rig.info(stream).last_sequence == 1
    assert "advisory.subject" in rig.row("replication")["last_error"]
