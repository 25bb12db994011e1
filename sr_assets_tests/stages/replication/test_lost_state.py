"""A deleted state: the stream stops before it reads, and `recover` continues without repeating copies or advisories."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sr_assets.adapters.state.operator_settings import set_paused
from sr_assets.domain.errors import RunError
from sr_assets_tests.rig import SITE, Rig, Sent
from sr_assets_tests.servers import NatsServer
from sr_assets_tests.stages.replication.test_recover import numbered, numbers, recover

pytestmark = pytest.mark.process

TRACKED = {"inspect_field": "sender", "inspect_duration": "10h"}


def add_tracked(rig: Rig, **entry: str) -> tuple[str, str]:
    """Configure a tracked stream with reliable advisories; return it and the advisory stream."""
    stream, advisories = rig.make(), rig.make("ADV")
    rig.add(stream, advisory={"subject": f"{advisories}.%s.%v", "reliable": True}, **TRACKED, **entry)
    return stream, advisories


def announced(rig: Rig, advisories: str) -> list[tuple[str, str]]:
    """Return the stored advisories in order: event and node."""
    bodies = [json.loads(message.payload) for message in rig.stored(advisories)]
    return [(body["event"], body["value"]) for body in bodies]


def lose_state(rig: Rig) -> None:
    shutil.rmtree(rig.home / "sites")


def purge_target(rig: Rig, stream: str) -> None:
    rig.api(f"STREAM.PURGE.{stream}", {}, rig.target)


def delete_target(rig: Rig, stream: str) -> None:
    rig.api(f"STREAM.DELETE.{stream}", {}, rig.target)


def keep_target(rig: Rig, stream: str) -> None:
    """The target keeps its copies."""


def test_tracked_stream_without_its_state_announces_nothing(rig: Rig) -> None:
    stream, advisories = add_tracked(rig)
    rig.publish(stream, numbered(3))
    rig.drain()
    before = announced(rig, advisories)
    assert before == [("new", "n1"), ("new", "n2"), ("new", "n3")]
    lose_state(rig)
    rig.publish(stream, numbered(1, first=4))
    assert f"run `sr-assets recover --stream {SITE}/{stream}`" in rig.failure()
    assert announced(rig, advisories) == before
    assert numbers(rig, stream) == [1, 2, 3]
    assert "continues at 4; 3 copies found" in recover(rig, stream, force=False)
    rig.drain()
    assert announced(rig, advisories) == [*before, ("new", "n4")]
    assert numbers(rig, stream) == [1, 2, 3, 4]


@pytest.mark.parametrize("empty", (delete_target, pytest.param(purge_target, marks=pytest.mark.nightly)))
def test_advisories_alone_reveal_a_lost_state(rig: Rig, empty: Callable[[Rig, str], None]) -> None:
    stream, advisories = add_tracked(rig)
    rig.publish(stream, numbered(3))
    rig.drain()
    before = announced(rig, advisories)
    empty(rig, stream)
    lose_state(rig)
    rig.publish(stream, numbered(1, first=4))
    assert "already holds advisories of it (node n1, transition 1)" in rig.failure()
    assert announced(rig, advisories) == before
    assert "continues at 4; 0 copies found" in recover(rig, stream, force=False)
    rig.drain()
    assert announced(rig, advisories) == [*before, ("new", "n4")]
    assert numbers(rig, stream) == [4]
    # The next message of each node is copied: it is unknown which ones were.
    rig.publish(stream, numbered(3))
    rig.drain()
    assert numbers(rig, stream) == [4, 1, 2, 3]


@pytest.mark.parametrize("change", (purge_target, pytest.param(keep_target, marks=pytest.mark.nightly)))
def test_recovered_node_keeps_its_announced_silence(rig: Rig, change: Callable[[Rig, str], None]) -> None:
    stream, advisories = add_tracked(rig, warn_duration="5h")
    rig.publish(stream, numbered(2))
    rig.drain()
    rig.travel(hours=6)
    rig.drain()
    assert ("timeout", "n2") in announced(rig, advisories)
    rig.publish(stream, numbered(1))
    rig.drain()
    change(rig, stream)
    lose_state(rig)
    recover(rig, stream, force=False)
    rig.publish(stream, numbered(1))
    rig.drain()
    assert [event for event, node in announced(rig, advisories) if node == "n2"] == ["new", "timeout"]
    rig.publish(stream, numbered(1, first=2))
    rig.drain()
    last = json.loads(
        next(m.payload for m in reversed(rig.stored(advisories)) if json.loads(m.payload)["value"] == "n2")
    )
    assert (last["event"], last["transition"], last["previous"]) == ("recover", 3, "timeout")


@pytest.mark.parametrize("cluster", ("source", "target"))
def test_unreachable_target_delays_only_unproven_announcements(rig: Rig, tmp_path: Path, cluster: str) -> None:
    """A first run: the source's advisory stream proves that nothing was announced; the target's does not respond."""
    stream, advisories = rig.make(), rig.make("ADV")
    with NatsServer(tmp_path / "target", "target") as target:
        if cluster == "target":
            rig.create(advisories, server=target)
        advisory = {"subject": f"{advisories}.%s.%v", "cluster": cluster, "reliable": True}
        rig.add(stream, target_url=target.url, advisory=advisory, **TRACKED)
        rig.publish(stream, numbered(1))
        target.kill()
        rig.run()
        assert rig.row("replication")["seen_messages"] == (1 if cluster == "source" else 0)
        target.start()
        rig.drain()
        keeper = target if cluster == "target" else rig.source
        assert [json.loads(message.payload)["value"] for message in rig.stored(advisories, keeper)] == ["n1"]
        assert len(rig.stored(stream, target)) == 1


def test_stream_that_began_without_its_target_can_be_recovered(rig: Rig, tmp_path: Path) -> None:
    stream = rig.make()
    with NatsServer(tmp_path / "target", "target") as target:
        rig.add(stream, target_url=target.url, **TRACKED)
        rig.publish(stream, numbered(3))
        rig.drain()
        lose_state(rig)
        target.kill()
        rig.run()
        assert rig.row("replication")["seen_messages"] == 3
        target.start()
        assert "sr-assets recover" in rig.failure()
        recover(rig, stream, force=False)
        rig.publish(stream, numbered(1, first=4))
        rig.drain()
        assert [json.loads(copy.payload)["n"] for copy in rig.stored(stream, target)] == [1, 2, 3, 4]


def test_recovery_announces_no_event_after_the_last_copy_again(rig: Rig) -> None:
    """Tracking was ahead of copying: the next run finds these events again in the messages that it copies."""
    stream, advisories = add_tracked(rig, warn_duration="1h")
    rig.publish(stream, numbered(1))
    rig.drain()
    settings = rig.settings()
    set_paused(settings, settings.streams[0], True)
    rig.travel(hours=3)
    rig.publish(stream, [*numbered(1), *numbered(1, first=2)])
    rig.drain()
    before = announced(rig, advisories)
    assert sorted(before) == [("new", "n1"), ("new", "n2"), ("recover", "n1"), ("timeout", "n1")]
    lose_state(rig)
    assert "continues at 2; 1 copies found" in recover(rig, stream, force=False)
    # It stays paused without its state.
    rig.drain()
    assert numbers(rig, stream) == [1]
    set_paused(settings, settings.streams[0], False)
    rig.drain()
    assert numbers(rig, stream) == [1, 2]
    assert announced(rig, advisories) == before


def claim(rig: Rig, stream: str, sequence: int, stored_ms: int) -> None:
    """Publish a message with the headers of a copy, and another content, to the target."""
    (entry,) = rig.settings().streams
    headers = f"NATS/1.0\r\nChoria-SR-Source: {stream} {sequence} {entry.replicator} {entry.name} {stored_ms}\r\n\r\n"
    rig.publish(stream, [Sent(b"forged", headers=headers.encode())], rig.target)


def copied_numbers(rig: Rig, stream: str) -> list[int]:
    """Return the numbers in the target's messages that nobody forged."""
    return [json.loads(copy.payload)["n"] for copy in rig.stored(stream, rig.target) if copy.payload != b"forged"]


def test_forged_copies_neither_stop_a_first_run_nor_count_as_found(rig: Rig) -> None:
    stream = rig.make()
    rig.create(stream, server=rig.target)
    rig.add(stream, **TRACKED)
    rig.publish(stream, numbered(5))
    times = {message.sequence: message.stored_ns // 1_000_000 for message in rig.stored(stream)}
    claim(rig, stream, 5, times[5])
    claim(rig, stream, 2, 1)
    claim(rig, stream, 999_999, times[5])
    rig.drain()
    assert copied_numbers(rig, stream) == [1, 2, 3, 4, 5]
    rig.publish(stream, numbered(3, first=6))
    lose_state(rig)
    claim(rig, stream, 5, times[5])
    claim(rig, stream, 8, rig.stored(stream)[-1].stored_ns // 1_000_000)
    # The last one may be of a rolled-back source; those before a genuine copy are not.
    claim(rig, stream, 999_999, times[5])
    with pytest.raises(RunError, match="ends at 8, before the copied message 999999"):
        recover(rig, stream, force=False)
    rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": rig.info(stream, server=rig.target).last_sequence}, rig.target)
    summary = recover(rig, stream, force=False)
    assert "continues at 6;" in summary
    assert f"target stream {stream} holds 3 messages that claim to be copies of other messages" in summary
    rig.drain()
    assert copied_numbers(rig, stream) == [1, 2, 3, 4, 5, 6, 7, 8]
