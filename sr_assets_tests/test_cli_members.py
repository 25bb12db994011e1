"""The commands `members` and `step-down`, `check --connect` of an election, and the role of a home in tables and metrics."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.published.fleet_reader import open_fleet
from sr_assets.domain.errors import RunError
from sr_assets.operate.metrics import Exposition
from sr_assets.settings import Settings, parse_cluster
from sr_assets.stages.connectivity import probe_connectivity
from sr_assets.stages.leadership import Leadership
from sr_assets.stages.report import Stage
from sr_assets.stages.run import run_site
from sr_assets.stages.site import Site
from sr_assets_tests.members import key_of, make_bucket, member, write_key
from sr_assets_tests.rig import SITE, Command, Rig, Sent, wait_until
from sr_assets_tests.servers import NatsServer

HOST = socket.gethostname()


@pytest.fixture
def stream(rig: Rig) -> str:
    name = rig.make()
    rig.add(name, target_stream=rig.unique("T"), target_subject_prefix=rig.unique("copy"))
    return name


@pytest.fixture
def pair(rig: Rig, tmp_path: Path, stream: str) -> Iterator[tuple[Leadership, Leadership]]:
    """Two members of which the first leads; the command uses the second one's configuration."""
    bucket = make_bucket(rig)
    first, second = (member(rig, tmp_path, name, bucket) for name in ("a", "b"))
    with Leadership(first, SITE) as leader:
        leader.require()
        with Leadership(second, SITE) as follower:
            yield leader, follower


def use(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(folder / "replication.yaml"))
    monkeypatch.delenv("SR_ASSETS_HOME", raising=False)


def listed(command: Command) -> dict[str, Any]:
    code, output, errors = command("members", "--format", "json")
    assert (code, errors) == (0, "")
    (row,) = json.loads(output)
    assert list(row) == [
        "name",
        "leader",
        "leader_host",
        "leader_since",
        "followers",
        "checkpoint_at",
        "checkpoint_age_seconds",
        "checkpoint_position",
    ]
    return dict(row)


def test_members_lists_leader_and_followers(
    pair: tuple[Leadership, Leadership], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    use(monkeypatch, tmp_path / "b")
    row = listed(command)
    assert (row["name"], row["leader"], row["leader_host"], row["followers"]) == (SITE, "a", HOST, ["b"])
    assert pair[0].lease.line == f"a on {HOST} leads since {row['leader_since']}"


def test_members_lists_a_stream_replicator_without_its_host(
    rig: Rig, stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    bucket = make_bucket(rig)
    member(rig, tmp_path, "b", bucket)
    use(monkeypatch, tmp_path / "b")
    assert listed(command)["leader"] is None
    write_key(rig, bucket, key_of(stream), "go-1")
    row = listed(command)
    assert (row["leader"], row["leader_host"]) == ("go-1", None)
    assert row["leader_since"].startswith("20")


def test_step_down_hands_over(
    pair: tuple[Leadership, Leadership], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    leader, follower = pair
    use(monkeypatch, tmp_path / "b")
    code, output, errors = command("step-down", "--site", SITE)
    assert (code, output, errors) == (1, "", f"error: {SITE}: this member does not lead: {leader.lease.line}\n")
    use(monkeypatch, tmp_path / "a")
    assert command("step-down") == (0, f"{SITE}: stepped down\n", "")
    wait_until(lambda: follower.leads, "the follower to lead")
    assert not leader.leads
    code, output, errors = command("step-down", "--site", "PARIS")
    assert (code, errors) == (2, f"error: --site PARIS: is not configured; configured: {SITE}\n")


def test_tables_and_metrics_show_the_role(rig: Rig, stream: str, tmp_path: Path) -> None:
    settings = member(rig, tmp_path, "a", make_bucket(rig))

    def shown() -> tuple[Any, ...]:
        with open_fleet(settings.home) as fleet:
            info = fleet.execute("SELECT role, leader FROM snapshot_info").fetchall()
            leaders = fleet.execute("SELECT name, role, leader, leader_host FROM site_leaders").fetchall()
        return info[0] if len(leaders) == 1 and leaders[0][:3] == (SITE, *info[0]) else ()

    with Leadership(settings, SITE) as leadership:
        leadership.require()
        with Site(settings, SITE, owner="test", run_id="test") as site:
            run_site(site, {stream: frozenset(Stage)}, drain_only=True)
        assert shown() == ("leader", "a")
        text = Exposition(settings).text()
        labels = f'election="{key_of(stream)}",identity="a"'
        assert f'choria_stream_replicator_election_leader{{{labels},replicator="{SITE}"}} 1\n' in text
        assert f'choria_stream_replicator_election_campaigns{{{labels},state="candidate",replicator="{SITE}"}} ' in text
        assert f"choria_stream_replicator_election_interval_seconds{{{labels}," in text
        assert f'sr_assets_leader{{name="{SITE}"}} 1\n' in text
        assert write_key(rig, settings.leader_election.bucket, key_of(stream), "go-1", revision=None)
        wait_until(lambda: shown() == ("follower", "go-1"), "the tables to show the new leader")
        assert f'sr_assets_leader{{name="{SITE}"}} 0\n' in Exposition(settings).text()


def refused(settings: Settings) -> list[str]:
    return [probe.learned for probe in probe_connectivity(settings) if not probe.works]


def test_check_refuses_a_short_duplicate_window(rig: Rig, tmp_path: Path) -> None:
    stream, target, feed = rig.make(), rig.unique("T"), rig.unique("FEED")
    rig.create(target, rig.target, duplicate_window=3 * 10**9)
    rig.create(feed, duplicate_window=4 * 10**9)
    advisory = {"subject": f"{feed}.%s.%v", "reliable": True}
    rig.add(
        stream,
        target_stream=target,
        target_subject_prefix=target,
        inspect_subject_token=1,
        inspect_duration="1h",
        advisory=advisory,
    )
    bucket = make_bucket(rig, 2)
    settings = member(rig, tmp_path, "a", bucket)
    (line,) = refused(settings)
    assert line == (
        f"stream {target} on {rig.target.address} has a duplicate window of 3 s, less than two TTLs of the leader election;"
        " set duplicate_window to 4s or more"
    )
    longer = member(rig, tmp_path, "a", make_bucket(rig, 3))
    assert [line.split()[1] for line in refused(longer)] == [target, feed]
    assert refused(rig.settings()) == []


def test_check_refuses_a_bucket_without_ttl(rig: Rig, stream: str, tmp_path: Path) -> None:
    bucket = make_bucket(rig, 0)
    (line,) = refused(member(rig, tmp_path, "a", bucket))
    assert f"bucket {bucket} has no TTL; leader election needs 1 s to 1 h" in line


@pytest.mark.parametrize(
    ("denied", "named", "exists"),
    (("$JS.API.STREAM.CREATE.>", "STREAM.CREATE.KV_ELECTION", False), ("$KV.>", "$KV.ELECTION.SR_", True)),
)
def test_missing_permission_is_one_line(
    rig: Rig, stream: str, tmp_path: Path, denied: str, named: str, exists: bool
) -> None:
    member_of = f'{{user: member, password: s3cret, permissions: {{publish: {{deny: ["{denied}"]}}}}}}'
    users = f"authorization {{users: [{{user: admin, password: admin}}, {member_of}]}}"
    with NatsServer(tmp_path / "server", "locked", config=users) as server:
        if exists:
            config = {"subjects": ["$KV.ELECTION.>"], "max_msgs_per_subject": 1, "max_age": 2 * 10**9}
            with Cluster(parse_cluster(f"nats://admin:admin@{server.address}")) as opened:
                opened.create_stream({"name": "KV_ELECTION", "duplicate_window": 10**9, **config})
        where = f"nats://member:s3cret@{server.address}"
        block = {"bucket": "ELECTION", "cluster": where}
        settings = rig.settings(leader_election_name="a", leader_election=block)
        with pytest.raises(RunError) as raised, contextlib.ExitStack() as stack:
            stack.enter_context(Leadership(settings, SITE))
        line = str(raised.value)
        assert named in line
        assert "permissions violation" in line.lower()
        assert "\n" not in line
        assert "s3cret" not in line
        assert any(named in line for line in refused(settings))


def test_checkpoint_and_restore_as_commands(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    stream = rig.make()
    rig.add(stream)
    rig.publish(stream, [Sent(b"1"), Sent(b"2")])
    rig.drain()
    rig.settings(checkpoint={"bucket": rig.unique("STATE")})
    use(monkeypatch, rig.home)
    file = tmp_path / "checkpoint"
    code, output, errors = command("checkpoint", "-o", str(file))
    assert (code, errors) == (0, "")
    assert output.startswith(f"{SITE}: wrote a checkpoint of ")
    assert command("checkpoint") == (0, f"{SITE}: stored a checkpoint\n", "")
    assert listed(command)["checkpoint_position"] == 3
    for argument in ((), (str(file),)):
        code, output, errors = command("restore", *argument)
        assert (code, errors) == (0, "")
        assert f"{stream} at 3" in output
        assert "the previous state is kept as" in output
    rig.publish(stream, [Sent(b"3")])
    rig.drain()
    assert [copy.payload for copy in rig.copies(stream)] == [b"1", b"2", b"3"]
    code, _, errors = command("restore", "--site", "PARIS")
    assert (code, errors) == (2, f"error: --site PARIS: is not configured; configured: {SITE}\n")
