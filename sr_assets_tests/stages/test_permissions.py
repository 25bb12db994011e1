"""Servers whose user has only the printed permissions carry every feature, and the check names each removed line."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.wire import Outgoing, Publisher
from sr_assets.domain.permissions import USER_INFO, Action
from sr_assets.domain.subjects import covers
from sr_assets.settings import Settings
from sr_assets.settings.needed_permissions import needed_permissions
from sr_assets.stages.connection_users import ask_servers, probe_permissions
from sr_assets.stages.heartbeat_publisher import publish_heartbeat
from sr_assets.stages.operator_commands import request_parked
from sr_assets.stages.replication.recover import recover_stream
from sr_assets_tests.rig import SITE, Command, Rig, Sent, cluster, connection
from sr_assets_tests.servers import NatsServer

pytestmark = pytest.mark.process

ADMIN = "{ user: admin, password: admin }"
OPEN = f"authorization {{ users: [ {ADMIN}, {{ user: sr, password: sr }} ] }}"
#: Connections without a login are the tests' own.
COMMON = "no_auth_user: admin\ntrace: true\ndebug: true\n"
#: Permissions of rare moments: a missing target or bucket, large batches, a lagging link, a checkpoint of many chunks.
RARE = re.compile(
    r"STREAM\.CREATE|STREAM\.UPDATE|CONSUMER\.|STREAM\.NAMES|DIRECT\.GET|JS\.FC|GET\.GATHERED|STREAM\.PURGE|(source|target)\.API|LIST|INFO"
)
NODES = [f"n{number}" for number in range(20)]


@dataclass(slots=True)
class Guarded:
    """A rig between two servers on which the configuration's user can be restricted."""

    rig: Rig
    top: dict[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        """The configuration."""
        return self.rig.settings(**self.top)

    def restrict(self, text: str) -> None:
        """Give the user only the permissions of the printed blocks."""
        blocks = re.findall(
            r"^# nats://(\S+) user sr.*\n(?:#.*\n)*(authorization \{\n(?:.*\n)*?\}\n)", text, re.MULTILINE
        )
        assert len(blocks) == 2, text
        for server in (self.rig.source, self.rig.target):
            block = dict(blocks)[server.address].replace("users = [", f"users = [\n{ADMIN}")
            server.reload(COMMON + block.replace("$SR_ASSETS_PASSWORD", "sr"))

    def violations(self) -> list[str]:
        """Return the violations that the servers logged."""
        logs = (server.log_file.read_text() for server in (self.rig.source, self.rig.target))
        return [line for log in logs for line in log.splitlines() if "Violation" in line]

    def used(self, server: NatsServer) -> set[tuple[Action, str]]:
        """Return the traced publishes and subscriptions of the user."""
        traced = re.findall(r'user:sr" - <<- \[(H?PUB|SUB) (\S+)', server.log_file.read_text())
        return {(Action.SUBSCRIBE if verb == "SUB" else Action.PUBLISH, subject) for verb, subject in traced}


@pytest.fixture
def guarded(tmp_path: Path, engine_home: Path, unique: Callable[[str], str]) -> Iterator[Guarded]:
    """A full configuration: tracked, plain and parked streams, feed, heartbeats, election, checkpoints, topology."""
    with (
        NatsServer(tmp_path / "source", "source", domain="source", config=COMMON + OPEN) as source,
        NatsServer(tmp_path / "target", "target", domain="target", config=COMMON + OPEN) as target,
    ):
        rig = Rig(engine_home, source, target, unique)
        at_source, at_target = (f"nats://sr:sr@{server.address}" for server in (source, target))
        urls = {"source_url": at_source, "target_url": at_target}
        rig.create("REG")
        rig.create("BIG")
        rig.create("BIG", target, max_msg_size=600)
        for name, server in (("ADV", source), ("CENTRE", target)):
            rig.create(name, server, subjects=["adv.>", "sr_assets.observer_alive.>"])
        rig.publish("REG", [Sent(json.dumps({"sender": node}).encode(), node) for node in NODES * 2])
        rig.publish("BIG", [Sent(b"x" * 900), Sent(b"small")])
        rig.create("KV_OPS", subjects=["$KV.OPS.>"], allow_msg_ttl=True)
        with connection(source) as opened:
            assert list(Publisher(opened).publish_all([Outgoing(1, "$KV.OPS.linger", b"", b"2s")]))
        tracked = {"inspect_field": "sender", "inspect_duration": "1h", "advisory": {"subject": "adv.%s.%v"}}
        rig.add("REG", **urls, **tracked, target_stream="COPY", target_subject_prefix="copy")
        rig.add("ADV", **urls, target_stream="CENTRE")
        rig.add("BIG", **urls)
        rig.add_feed("CENTRE", name="centre", url=at_target)
        clusters = {"s": {"url": at_source, "domain": "source"}, "t": {"url": at_target, "domain": "target"}}
        gathered = {"cluster": "t", "stream": "GATHERED", "sources": [{"stream": "CENTRE", "filter_subject": "adv.>"}]}
        yield Guarded(
            rig,
            {
                "data": {"ops": {"type": "kv", "url": at_source, "bucket": "OPS"}},
                "linger": {"data": "ops/linger"},
                "locks": ["ops/job"],
                "leader_election_name": "member",
                "checkpoint": {"interval": "1s"},
                "heartbeats": {"url": at_source, "subjects": [{"subject": "REG.beat"}]},
                "topology": {"manage": "reconcile", "clusters": clusters, "streams": [gathered]},
            },
        )


@pytest.fixture
def printed(guarded: Guarded, command: Command, monkeypatch: pytest.MonkeyPatch) -> str:
    """The blocks that `permissions` prints for the configuration."""
    assert guarded.settings
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(guarded.rig.home / "replication.yaml"))
    code, out, err = command("permissions")
    assert (code, err) == (0, "")
    assert "UNKNOWN" not in out
    return out


def passes(command: Command, *arguments: str) -> str:
    code, out, err = command(*arguments)
    assert code == 0, (arguments, out, err)
    return out


@pytest.mark.timeout(300)
def test_printed_permissions_carry_every_feature(guarded: Guarded, printed: str, command: Command) -> None:
    rig, settings = guarded.rig, guarded.settings
    needs = needed_permissions(settings, ask_servers(settings))
    guarded.restrict(printed)
    assert "have all permissions" in passes(command, "permissions", "--check")
    passes(command, "topology", "apply")
    rig.drain(**guarded.top)
    rig.drain("centre", **guarded.top)
    assert len(rig.copies("COPY")) == len(NODES)
    assert {row["node"] for row in rig.rows("global_availability")} == set(NODES)
    for by_hand in (("retire", NODES[0], "--reason", "moved"), ("unretire", NODES[0])):
        passes(command, *by_hand)
        rig.drain(**guarded.top)
    with cluster(rig.target) as opened:
        config = opened.stream_info("BIG").config
        opened.request_api("STREAM.UPDATE.BIG", {**config, "max_msg_size": -1})
    big = next(stream for stream in settings.streams if stream.stream == "BIG")
    assert request_parked(settings, big) == (1, 0)
    rig.drain(**guarded.top)
    assert len(rig.copies("BIG")) == 2
    assert settings.heartbeats is not None
    with Cluster(settings.heartbeats.cluster, "test") as opened:
        publish_heartbeat(opened, settings.heartbeats.subjects[0])
    for arguments in (("lag",), ("members",), ("checkpoint", "--site", SITE), ("report",), ("topology", "plan")):
        passes(command, *arguments)
    passes(command, "restore", "--site", SITE)
    for entry in settings.streams:
        recover_stream(settings, entry, force=True)
    rig.drain(**guarded.top)
    passes(command, "check", "--connect")
    assert not guarded.violations()
    for server in (rig.source, rig.target):
        used = guarded.used(server)
        mine = {(need.action, need.subject) for need in needs if server.address in need.cluster.servers}
        unused = {
            subject
            for action, subject in mine
            if action is not Action.IMPORT and not any(action is verb and covers(subject, sent) for verb, sent in used)
        }
        assert {subject for subject in unused if not RARE.search(subject)} == set()


@pytest.mark.timeout(300)
def test_check_names_each_removed_line(guarded: Guarded, printed: str) -> None:
    settings, lines = guarded.settings, printed.splitlines()
    removable = [number for number, line in enumerate(lines) if re.match(r'\s+"(?!_INBOX)', line)]
    assert len(removable) > 50
    for number in removable:
        guarded.restrict("\n".join([*lines[:number], *lines[number + 1 :], ""]))
        subject = json.loads(lines[number].partition("  # ")[0])
        probes = {probe.tried: probe for probe in probe_permissions(settings)}
        failed = {tried: probe.learned for tried, probe in probes.items() if not probe.works}
        if subject == USER_INFO:
            assert failed == {}
            assert "may not read its own permissions" in probes[f"publish {subject}"].learned
            continue
        assert set(failed) == {f"publish {subject}"}
        assert "; grant it as `sr-assets permissions` prints it" in failed[f"publish {subject}"]


@pytest.mark.timeout(120)
def test_check_accepts_a_user_that_may_not_read_its_permissions(
    guarded: Guarded, printed: str, command: Command
) -> None:
    guarded.restrict("\n".join(line for line in printed.splitlines() if USER_INFO not in line) + "\n")
    _, out, err = command("check", "--connect")
    assert "may not read its own permissions" in out
    assert "may not" not in err, "the probes decide"


def test_check_names_a_missing_inbox(guarded: Guarded, printed: str) -> None:
    settings = guarded.settings
    guarded.restrict(printed.replace('"_INBOX.>"', '"elsewhere.>"'))
    failed = {probe.tried for probe in probe_permissions(settings) if not probe.works}
    assert failed == {"subscribe _INBOX.>"}


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_commands_name_a_missing_permission(guarded: Guarded, printed: str, command: Command) -> None:
    removed = ("$JS.API.DIRECT.GET.REG", "adv.*.>", "$JS.API.STREAM.UPDATE.GATHERED")
    for subject in removed:
        assert f'"{subject}"' in printed
        printed = printed.replace(f'"{subject}"', "")
    guarded.restrict(printed)
    for arguments in (("check", "--connect"), ("permissions", "--check")):
        code, _, err = command(*arguments)
        assert code == 1
        for subject in removed:
            assert [line for line in err.splitlines() if f"may not publish {subject}, to" in line], err
    code, out, _ = command("permissions", "--check", "--format", "json")
    assert code == 1
    granted = {row["subject"]: row["granted"] for row in json.loads(out)}
    assert (granted["adv.*.>"], granted["$JS.API.STREAM.INFO.REG"], granted["_INBOX.>"]) == (False, True, True)
    _, _, err = command("run", "--once", "--stream", "BIG")
    assert "may not publish adv.*.>, to publish advisories" in err


@pytest.mark.timeout(120)
def test_refused_core_advisories_wait_for_the_permission(guarded: Guarded, printed: str) -> None:
    rig = guarded.rig
    rig.entries[:] = [rig.entries[0]]
    rig.entries[0]["advisory"]["reliable"] = False
    guarded.restrict(printed.replace('"adv.*.>"', ""))
    undeliverable = rig.run()["REG"].undeliverable
    assert undeliverable is not None
    assert 'permissions violation for publish to "adv.new.n' in undeliverable
    assert {row["published_at"] for row in rig.rows("node_advisories")} == {None}
    guarded.restrict(printed)
    assert rig.drain()["REG"].undeliverable is None
    assert None not in {row["published_at"] for row in rig.rows("node_advisories")}
