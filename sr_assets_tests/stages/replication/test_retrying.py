"""`retry-parked`: each parked message is copied once after the target was changed."""

import sys
from typing import Any

import pytest

from sr_assets.assets.checks import check_parked
from sr_assets_tests.forks import run_forked
from sr_assets_tests.rig import SITE, Rig, Sent

pytestmark = pytest.mark.process


def retry(rig: Rig, code: int = 0) -> str:
    """Run the command as its own process; return its output."""
    command = [sys.executable, "-W", "ignore", "-m", "sr_assets", "retry-parked", "--stream", rig.entries[0]["stream"]]
    environ = {"SR_ASSETS_CONFIG": str(rig.home / "replication.yaml"), "PATH": "/usr/bin:/bin", "HOME": str(rig.home)}
    done = run_forked(command, env=environ)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def change_target(rig: Rig, target: str, **config: Any) -> None:
    """Change the configuration of a target."""
    answer = rig.api(f"STREAM.UPDATE.{target}", {**rig.info(target, rig.target).config, **config}, rig.target)
    assert "error" not in answer


def counts(rig: Rig) -> dict[str, int]:
    columns = ("seen_messages", "copied_messages", "copied_bytes", "parked_messages")
    return {column: rig.row("replication")[column] for column in columns}


@pytest.mark.parametrize(
    "sampled", (pytest.param(False, id="plain", marks=pytest.mark.nightly), pytest.param(True, id="sampled"))
)
def test_parked_messages_are_copied_once_after_the_target_changed(rig: Rig, sampled: bool) -> None:
    stream, target = rig.make(), rig.unique("T")
    bodies = [b'{"sender": "n%d", "x": "%s"}' % (n, b"y" * size) for n, size in enumerate((10, 2000, 3000, 10, 4000))]
    rig.create(target, rig.target, subjects=[f"{stream}.>"], max_msg_size=1000)
    rig.publish(stream, [Sent(body) for body in bodies])
    rig.add(stream, target_stream=target, **({"inspect_field": "sender", "inspect_duration": "1h"} if sampled else {}))
    rig.drain()
    whole = {"seen_messages": 5, "copied_messages": 5, "copied_bytes": sum(map(len, bodies)), "parked_messages": 0}
    small = {"copied_messages": 2, "copied_bytes": len(bodies[0]) + len(bodies[3]), "parked_messages": 3}
    assert counts(rig) == {**whole, **small}
    with rig.open() as site:
        (entry,) = site.settings.streams
        failed = check_parked(site, entry)
    assert not failed.passed
    assert f"run `sr-assets retry-parked --stream {SITE}/{stream}`" in (failed.description or "")
    # The target refuses the largest one still: it is parked again.
    change_target(rig, target, max_msg_size=3500)
    assert "copying 3 parked messages again" in retry(rig)
    assert [row["sequence"] for row in rig.rows("parked_messages")] == [5]
    assert counts(rig)["copied_messages"] == 4
    change_target(rig, target, max_msg_size=-1)
    assert "copying 1 parked messages again" in retry(rig)
    assert "no message to copy again" in retry(rig)
    assert sorted(copy.payload for copy in rig.copies(target)) == sorted(bodies)
    assert rig.rows("parked_messages") == []
    assert counts(rig)["copied_messages"] == 5
    with rig.open() as site:
        assert check_parked(site, entry).passed
    rig.drain()
    assert [row["sequence"] for row in rig.rows("SELECT sequence FROM node_snapshot_history ORDER BY ALL")] == (
        [1, 2, 3, 4, 5] if sampled else []
    )
    assert len(rig.rows("node_snapshots")) == (5 if sampled else 0)


def test_parked_message_that_the_source_lost_stays_parked(rig: Rig) -> None:
    stream, target = rig.make(), rig.unique("T")
    rig.create(target, rig.target, subjects=[f"{stream}.>"], max_msg_size=1000)
    rig.publish(stream, [Sent(b"x" * 2000), Sent(b"y")])
    rig.add(stream, target_stream=target)
    rig.drain()
    assert rig.api(f"STREAM.MSG.DELETE.{stream}", {"seq": 1})["success"]
    output = retry(rig)
    assert "1 parked messages stay parked: the source no longer holds them" in output
    assert "no message to copy again" in output
    assert [row["sequence"] for row in rig.rows("parked_messages")] == [1]
