"""Tables of a follower: those of the newest checkpoint, without a change of its own state."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.adapters.state.checkpoint import last_stored
from sr_assets.adapters.state.lock import SiteBusyError, SiteLock
from sr_assets.adapters.state.status_file import read_status
from sr_assets.operate.notify import begin_notifying, notify_once
from sr_assets.settings import NotifySettings, Settings
from sr_assets.stages.checkpointing import open_store
from sr_assets.stages.leadership import Leadership
from sr_assets.stages.report import Stage
from sr_assets.stages.run import run_site
from sr_assets.stages.site import Site
from sr_assets.stages.standby_tables import FollowedSite, follow_checkpoints, show_checkpoint
from sr_assets_tests.members import make_bucket, member
from sr_assets_tests.operate.test_notify import Receiver, receiving
from sr_assets_tests.rig import SITE, Rig, wait_until
from sr_assets_tests.stages.test_checkpointing import TRACKED, numbered, numbers

pytestmark = pytest.mark.process

TABLES = ("replication", "node_availability", "node_advisories", "gaps", "site_summary")


@pytest.fixture
def stream(rig: Rig) -> str:
    """Configure a tracked stream with a few messages; neither stream recognises a repeated message for long."""
    name, feed = rig.make(), rig.make("FEED", duplicate_window=100_000_000)
    target = rig.make("TARGET", rig.target, duplicate_window=100_000_000)
    advisory = {"subject": f"{feed}.%s.%v", "reliable": True}
    rig.add(name, **TRACKED, advisory=advisory, target_stream=target, target_subject_prefix=target)
    rig.publish(name, numbered(1, 20))
    return name


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as opened:
        yield opened


@pytest.fixture
def homes(rig: Rig, tmp_path: Path, stream: str) -> tuple[Settings, Settings]:
    bucket = make_bucket(rig)
    return member(rig, tmp_path, "a", bucket), member(rig, tmp_path, "b", bucket)


@pytest.fixture
def leader(homes: tuple[Settings, Settings]) -> Iterator[Leadership]:
    with Leadership(homes[0], SITE) as leadership:
        leadership.require()
        yield leadership


def drain(settings: Settings) -> None:
    with Site(settings, SITE, owner="test", run_id="test") as site:
        reports = run_site(site, {entry.stream: frozenset(Stage) for entry in site.entries}, drain_only=True)
    assert [report.failure for report in reports.values() if report.failure] == []


def ask(settings: Settings, query: str) -> list[tuple[Any, ...]]:
    with open_fleet(settings.home) as fleet:
        return fleet.execute(query).fetchall()


def tables(settings: Settings) -> dict[str, list[tuple[Any, ...]]]:
    return {name: ask(settings, f"FROM {name} ORDER BY ALL") for name in TABLES}


def positions(settings: Settings) -> list[tuple[Any, ...]]:
    return ask(settings, "SELECT next_sequence FROM replication")


def test_follower_shows_the_newest_checkpoint(rig: Rig, homes: tuple[Settings, Settings], leader: Leadership) -> None:
    first, second = homes
    drain(first)
    with Leadership(second, SITE):
        assert show_checkpoint(second, SITE)
        assert not show_checkpoint(second, SITE)
        shown = tables(second)
        assert shown == tables(first)
        assert len(shown["node_availability"]) == 5
        assert ask(second, "SELECT role, leader, run_id FROM snapshot_info") == [("follower", "a", "checkpoint")]
        stored = last_stored(first.home / "sites" / SITE)
        assert stored is not None
        assert ask(second, "SELECT epoch_us(checkpoint_at) FROM site_leaders") == [(stored.at_ns // 1000,)]
        rig.publish(rig.entries[0]["stream"], numbered(20, 30))
        drain(first)
        assert show_checkpoint(second, SITE)
        assert tables(second) == tables(first) != shown
    assert sorted(path.name for path in (second.home / "sites" / SITE).glob("s*")) == []


def test_follower_leaves_notifications_to_the_leader(
    rig: Rig, homes: tuple[Settings, Settings], leader: Leadership, receiver: Receiver
) -> None:
    target = NotifySettings.model_validate({"name": "ops", "webhook": receiver.url, "events": ["new"]})
    first, second = (settings.changed(notify=(target,)) for settings in homes)
    for settings in (first, second):
        begin_notifying(settings)
    drain(first)
    with Leadership(second, SITE):
        assert show_checkpoint(second, SITE)
        for settings in (second, first, second):
            notify_once(settings)
    # What the leader has sent, the next leader does not repeat.
    notify_once(second)
    nodes = [node for (node,) in ask(first, "SELECT node FROM node_advisories ORDER BY node")]
    assert sorted(body["node"] for body in receiver.bodies) == nodes
    assert len(nodes) == 5


def test_follower_keeps_its_own_older_state(rig: Rig, stream: str, homes: tuple[Settings, Settings]) -> None:
    first, second = homes
    state = second.home / "sites" / SITE / "state.duckdb"
    drain(second)
    before = state.read_bytes(), read_status(state.parent)
    with Leadership(first, SITE) as leadership:
        leadership.require()
        rig.publish(stream, numbered(20, 40))
        drain(first)
        with Leadership(second, SITE):
            assert show_checkpoint(second, SITE)
        assert positions(second) == [(40,)]
        assert (state.read_bytes(), read_status(state.parent)) == before
        # Work after the checkpoint, which the next leader does not know.
        rig.publish(stream, numbered(40, 60))
        assert first.checkpoint is not None
        drain(first.changed(checkpoint=first.checkpoint.changed(interval_ns=0)))
    rig.publish(stream, numbered(60, 61))
    drain(second)
    made = numbers(rig, rig.entries[0]["target_stream"])
    assert (sorted(made), made[-1]) == (sorted(set(made)), 60)
    assert ask(second, "SELECT seen_messages, next_sequence, role FROM replication, snapshot_info") == [
        (60, 61, "leader")
    ]


def test_interrupted_publication_is_repeated(homes: tuple[Settings, Settings], leader: Leadership) -> None:
    first, second = homes
    drain(first)
    folder = second.home / "sites" / SITE
    with Leadership(second, SITE):
        with SiteLock(folder, "test", 1.0), pytest.raises(SiteBusyError):
            show_checkpoint(second, SITE)
        assert not (second.home / "fleet.duckdb").exists()
        assert show_checkpoint(second, SITE)
        (folder / "standby").mkdir()
        assert show_checkpoint(second, SITE)
        (second.home / "fleet.duckdb").unlink()
        assert show_checkpoint(second, SITE)
    assert tables(second) == tables(first)


def test_leader_never_shows_a_checkpoint(homes: tuple[Settings, Settings], leader: Leadership) -> None:
    first, second = homes
    drain(first)
    with Leadership(second, SITE), follow_checkpoints(first, [SITE]), follow_checkpoints(second, [SITE]):
        wait_until((second.home / "fleet.duckdb").exists, "the follower to publish")
        assert ask(first, "SELECT run_id FROM snapshot_info") == [("test",)]
        assert not show_checkpoint(first, SITE)


def test_unusable_checkpoint_is_one_warning(
    tmp_path: Path, homes: tuple[Settings, Settings], leader: Leadership, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = homes
    drain(first)
    text, store = tmp_path / "text", first.checkpoint_store(SITE)
    text.write_text("not a checkpoint")
    assert store is not None

    with Leadership(second, SITE):
        assert show_checkpoint(second, SITE)
        with open_store(store) as bucket:
            bucket.put(f"{SITE}/{SITE}", text, {"at_ns": 1, "positions": {}})
        # Always due.
        followed = FollowedSite(second.changed(checkpoint=store.changed(interval_ns=1)), SITE)
        for _ in range(3):
            followed.show_if_due()
    (warning,) = [record.message for record in caplog.records if "is not shown" in record.message]
    assert "is not a complete checkpoint" in warning
    assert tables(second) == tables(first)
