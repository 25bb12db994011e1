"""Streams in another JetStream domain, and in another account under a prefix: copied, folded, checked, recovered."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sr_assets.adapters.nats import administration, object_store
from sr_assets.adapters.nats.administration import Cluster, held_subjects
from sr_assets.adapters.nats.object_store import ObjectBucket
from sr_assets.adapters.wire import BatchPublisher, Connection, Items, Outgoing, Publisher, WireError, find_denied
from sr_assets.cli import run_command
from sr_assets.domain.clusters import domain_api
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.domain.permissions import Action
from sr_assets.embedded.nats_server import HOST
from sr_assets.settings import load_settings
from sr_assets.stages.replication.recover import recover_stream
from sr_assets.stages.topology.survey import Survey
from sr_assets_tests.rig import SITE, Rig, Sent, address, wait_until
from sr_assets_tests.server_versions import server_binary
from sr_assets_tests.servers import NatsServer, free_port

NODES = [f"web{n}" for n in range(20)]
SAMPLED = {"inspect_field": "sender", "inspect_duration": "1h"}
#: The SITE account may use the fleet's JetStream API under its own prefix.
ACCOUNTS = """
accounts: {
  FLEET: {
    jetstream: enabled
    users: [{user: fleet, password: fleet}]
    exports: [{service: "$JS.API.>", response_type: stream, accounts: [SITE]}]
  }
  SITE: {
    jetstream: enabled
    users: [
      {user: site, password: site}
      {user: bound, password: bound, permissions: {subscribe: ["mine.>"], publish: {deny: ["$JS.API.STREAM.CREATE.>"]}}}
    ]
    imports: [{service: {account: FLEET, subject: "$JS.API.>"}, to: "fleet.JS.API.>"}]
  }
}
"""


def sightings(size_bytes: int = 0) -> list[Sent]:
    return [Sent(json.dumps({"sender": node}).encode() + b" " * size_bytes, node) for node in NODES * 2]


def in_domain(home: Path, domain: str, config: str, binary: Path | None = None) -> NatsServer:
    """Return a server whose JetStream has its own domain."""
    store = json.dumps(str(home / "jetstream"))
    config += f"jetstream: {{ domain: {domain}, store_dir: {store} }}\n"
    return NatsServer(home, domain, config=config, jetstream=False, binary=binary)


@pytest.fixture
def leaf(tmp_path: Path) -> Iterator[tuple[NatsServer, NatsServer]]:
    """A leaf node with the domain `leaf`, and its hub."""
    with joined(tmp_path) as servers:
        yield servers


@contextmanager
def joined(tmp_path: Path, binary: Path | None = None) -> Iterator[tuple[NatsServer, NatsServer]]:
    """Start a leaf node (by its own binary) and its hub, and wait until they have joined."""
    port = free_port()
    listen = f"leafnodes {{ listen: '{HOST}:{port}' }}\n"
    remote = f"leafnodes {{ remotes: [{{ url: 'nats://{HOST}:{port}' }}] }}\n"
    with (
        in_domain(tmp_path / "hub", "hub", listen) as hub,
        in_domain(tmp_path / "leaf", "leaf", remote, binary) as leaf,
    ):
        remote_leaf = replace(address(hub), api_prefix=domain_api("leaf"))

        def joined() -> bool:
            try:
                with Cluster(remote_leaf, "test") as opened:
                    return bool(opened.request_api("INFO"))
            except RunError:
                return False

        wait_until(joined, "the leaf node to join its hub")
        yield leaf, hub


@pytest.fixture
def rig(leaf: tuple[NatsServer, NatsServer], engine_home: Path, unique: Callable[[str], str]) -> Rig:
    """A rig between the leaf node and its hub."""
    return Rig(engine_home, *leaf, unique)


@pytest.mark.process
def test_leafnode_streams_are_copied_and_folded_through_the_hub(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream, plain, advisories = rig.make(), rig.make("PLAIN", allow_direct=False), rig.make("ADV")
    rig.publish(stream, sightings(1_000))
    rig.publish(plain, [Sent(b"%d" % n) for n in range(100)])
    through = {"source_url": rig.target.url, "source_domain": "leaf", "target_subject_prefix": "copy"}
    advisory = {"subject": f"{advisories}.%s.%v", "reliable": True}
    rig.add(stream, **through, **SAMPLED, advisory=advisory)
    rig.add(plain, **through, filter_subject=f"{plain}.>")
    rig.add_feed(advisories, name="centre", domain="leaf")
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(rig.home / "replication.yaml"))
    rig.settings()
    assert run_command(("check", "--connect", "--format", "json")) == 0, capsys.readouterr()
    tried = {row["tried"] for row in json.loads(capsys.readouterr().out)}
    assert {f"$JS.leaf.API.DIRECT.GET.{stream}", f"$JS.API.STREAM.CREATE.{plain}"} <= tried
    rig.drain()
    rig.drain("centre")
    assert len(rig.copies(stream)) == len(NODES)
    assert [message.payload for message in rig.copies(plain)] == [b"%d" % n for n in range(100)]
    assert {row["node"] for row in rig.rows("global_availability")} == set(NODES)
    assert run_command(("lag", "--format", "json")) == 0
    assert {row["lag_messages"] for row in json.loads(capsys.readouterr().out)} == {0}
    shutil.rmtree(rig.home / "sites" / SITE)
    for entry in rig.settings().streams:
        recover_stream(rig.settings(), entry)
    rig.drain()
    assert len(rig.copies(plain)) == 100


@pytest.mark.process
def test_permissions_come_from_the_users_own_server(leaf: tuple[NatsServer, NatsServer]) -> None:
    # The leaf node answers first about once in ten times.
    for _ in range(100):
        assert find_denied(address(leaf[1]), [(Action.PUBLISH, "$JS.API.INFO")]) == set()


@pytest.mark.process
def test_target_in_another_domain_is_created_through_the_leafnode(rig: Rig) -> None:
    stream = rig.make()
    rig.publish(stream, sightings())
    rig.add(stream, target_url=rig.source.url, target_domain="hub", target_subject_prefix="copy")
    rig.drain()
    assert len(rig.copies(stream)) == 2 * len(NODES)
    del rig.entries[0]["target_subject_prefix"]
    with pytest.raises(ConfigurationError, match="the subjects of both streams overlap"):
        rig.settings()


@pytest.mark.process
def test_copy_captured_by_a_leafnode_stream_stops_replication(rig: Rig) -> None:
    stream, capturing = rig.make(), rig.unique("THIEF")
    rig.create(stream, rig.target, subjects=[f"copy.{stream}.>"])
    rig.create(capturing, subjects=[f"copy.{stream}.>"])
    rig.publish(stream, [Sent(b"1")])
    rig.add(stream, target_url=rig.source.url, target_domain="hub", target_subject_prefix="copy")
    failure = rig.run()[stream].failure
    if failure is None:
        # The hub responded first.
        assert len(rig.copies(stream)) == 1
    else:
        assert f"another stream also accepts copy.{stream}.m; set another target_subject_prefix" in failure


@pytest.mark.process
@pytest.mark.parametrize("kind", (Publisher, BatchPublisher))
def test_acknowledgement_of_another_stream_does_not_count(
    leaf: tuple[NatsServer, NatsServer], unique: Callable[[str], str], kind: type[Publisher | BatchPublisher]
) -> None:
    stream, thief = unique("WANTED"), unique("THIEF")
    items = [Outgoing(number, f"copy.{stream}", b"", b"%d" % number) for number in range(1, 1_001)]

    def publish(hub: Connection) -> None:
        publisher = kind(hub, stream=stream, ack_timeout_seconds=5.0)
        if isinstance(publisher, BatchPublisher):
            end = publisher.publish(Items(items))
            assert (end.stored, end.last) == (1_000, 1_000)
        else:
            assert [ack.target_sequence for ack in publisher.publish_all(items)] == list(range(1, 1_001))

    config = {"subjects": [f"copy.{stream}"], "allow_batched": True}
    with Cluster(address(leaf[0]), "test") as at_leaf:
        at_leaf.create_stream({"name": thief, **config})
    refused = f"only of stream {thief} of domain leaf, which also accepts the subject"
    with Cluster(address(leaf[1]), "test") as at_hub:
        wait_until(lambda: reaches(at_hub, f"copy.{stream}"), "the hub to learn the subject of the leaf node's stream")
    with Connection(address(leaf[1])) as hub, pytest.raises(WireError, match=refused):
        publish(hub)
    with Cluster(address(leaf[1]), "test") as at_hub:
        at_hub.create_stream({"name": stream, **config})
    with Connection(address(leaf[1])) as hub:
        publish(hub)


def reaches(cluster: Cluster, subject: str) -> bool:
    """Return whether a stream takes a subject."""
    try:
        cluster.try_publishing(subject)
    except RunError:
        return False
    return True


@pytest.mark.process
def test_bucket_of_another_domain_leaves_no_chunks(
    leaf: tuple[NatsServer, NatsServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks pass through leaf nodes, so that each bucket of a name stores them; only one deletes the previous ones."""
    file = tmp_path / "checkpoint"
    file.write_bytes(b"x" * 300_000)
    with (
        ObjectBucket(address(leaf[0]), "STATE") as at_leaf,
        ObjectBucket(address(leaf[1]), "STATE") as at_hub,
        Cluster(address(leaf[1]), "test") as hub,
    ):
        for bucket, name in ((at_leaf, "leaf"), (at_hub, "hub")):
            bucket.put(name, file, {})
        for _ in range(30):
            at_leaf.put("leaf", file, {})
        at_hub.put("hub", file, {})
        # Recent chunks may belong to a put in progress; a put waits for the chunks of its own bucket.
        wait_until(
            lambda: len(list(held_subjects(hub, "OBJ_STATE", "$O.STATE.C.>"))) > 30, "the hub's copies of chunks"
        )
        monkeypatch.setattr(object_store, "_LEFT_NS", 0)
        at_hub.put("hub", file, {})
        assert len(list(held_subjects(hub, "OBJ_STATE", "$O.STATE.C.>"))) == 2
        for bucket, name in ((at_leaf, "leaf"), (at_hub, "hub"), (at_hub, "leaf")):
            stored = bucket.get(name, tmp_path / "read")
            assert stored is not None
            assert (tmp_path / "read").read_bytes() == file.read_bytes()


@pytest.mark.process
@pytest.mark.parametrize("minor", ("2.12", "2.14"))
def test_topology_knows_the_version_behind_a_leafnode(tmp_path: Path, minor: str) -> None:
    """The server of another domain may be older than the connected one, and lack what the plan relies on."""
    with joined(tmp_path, server_binary(minor)) as (_, hub):
        file = tmp_path / "replication.yaml"
        clusters = {"far": {"url": hub.url, "domain": "leaf"}, "near": {"url": hub.url}}
        home = str(tmp_path / "home")
        file.write_text(json.dumps({"name": "LONDON", "state_store": home, "topology": {"clusters": clusters}}))
        with Survey(load_settings(file, {})) as survey:
            versions = {name: surveyed.version[:2] for name, surveyed in survey.refresh().of.items()}
    assert versions["far"] == tuple(map(int, minor.split(".")))
    assert versions["near"] == (2, 15)


@pytest.mark.process
def test_checkpoint_that_only_another_bucket_stores_is_an_error(
    leaf: tuple[NatsServer, NatsServer], tmp_path: Path
) -> None:
    """nats-py counts the acknowledgement of any stream, here of the leaf node's own bucket of that name."""
    file = tmp_path / "checkpoint"
    file.write_bytes(b"x" * 300_000)
    through_leaf = replace(address(leaf[0]), api_prefix=domain_api("hub"))
    with ObjectBucket(address(leaf[0]), "STATE") as at_leaf, ObjectBucket(through_leaf, "STATE") as at_hub:
        at_leaf.put("leaf", file, {})
        at_hub.put("hub", file, {})
        with Cluster(address(leaf[1]), "test") as hub:
            config = hub.stream_info("OBJ_STATE").config
            hub.request_api("STREAM.UPDATE.OBJ_STATE", {**config, "max_msg_size": 100_000})
        with pytest.raises(RunError, match="object store STATE"):
            at_hub.put("hub", file, {})


@pytest.mark.process
def test_large_messages_and_many_subjects_keep_the_link_of_a_leafnode_open(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A leaf node or its hub closes the link on a response of more than 1 MiB; base64 adds a third."""
    monkeypatch.setattr(administration, "_LISTED", 1)
    stream = rig.make()
    rig.create(stream, rig.target, subjects=[f"copy.{stream}.>"])
    rig.add(stream, source_url=rig.target.url, source_domain="leaf", target_subject_prefix="copy")
    for number in range(3):
        rig.publish(stream, [Sent(b"x" * 900_000, f"m{number}")])
        rig.drain()
    assert len(rig.copies(stream)) == 3
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(rig.home / "replication.yaml"))
    assert run_command(("check", "--connect")) == 0
    assert "not compared: " in capsys.readouterr().out.replace("\n", " ")
    for server in (rig.source, rig.target):
        assert "maximum payload exceeded" not in server.log_file.read_text().lower()


@pytest.mark.process
def test_large_copies_keep_the_link_to_the_target_open(rig: Rig) -> None:
    """Each batch reads its last copy, some to measure them, and a look at the target the newest one."""
    stream = rig.make()
    rig.create(stream, rig.target, subjects=[f"copy.{stream}.>"], duplicate_window=60_000_000_000)
    # The site's servers are the leaf's: the target is reached over the link.
    rig.add(stream, target_url=rig.source.url, target_domain="hub", target_subject_prefix="copy")
    forged = b"NATS/1.0\r\nChoria-SR-Subject: beat\r\n\r\n"
    for number in range(2):
        rig.publish(stream, [Sent(b"x" * 900_000, f"m{number}"), Sent(b"x" * 900_000, "beat", headers=forged)])
        rig.drain()
        rig.drain()
    assert len(rig.copies(stream)) == 4
    for server in (rig.source, rig.target):
        assert "maximum payload exceeded" not in server.log_file.read_text().lower()


@pytest.mark.process
def test_unserved_domain_is_an_error_with_a_remedy(rig: Rig) -> None:
    stream = rig.make()
    rig.add(stream, source_domain="atlantis", target_subject_prefix="copy")
    failure = rig.failure()
    assert f"$JS.atlantis.API.STREAM.INFO.{stream}" in failure
    assert "no server here has domain atlantis; correct it" in failure


@pytest.mark.process
def test_streams_of_another_account_are_read_under_its_prefix(
    engine_home: Path,
    tmp_path: Path,
    unique: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with NatsServer(tmp_path / "shared", "shared", config=ACCOUNTS) as server:
        site, bound = (f"nats://{user}:{user}@{server.address}" for user in ("site", "bound"))
        rig, stream = Rig(engine_home, server, server, unique), unique("SHARED")
        with Cluster(replace(address(server), user="fleet", password="fleet"), "test") as opened:
            opened.create_stream({"name": stream, "subjects": [f"{stream}.>"], "allow_direct": True})
            opened.publish_many([(f"{stream}.{node}", b'{"sender":"%b"}' % node.encode(), node) for node in NODES])
        target = {"target_url": site, "target_stream": "COPIES", "target_subject_prefix": "copy"}
        rig.add(stream, source_url=site, source_api_prefix="fleet.JS.API", **target, **SAMPLED)
        rig.drain()
        with Cluster(replace(address(server), user="site", password="site"), "test") as opened:
            assert opened.stream_info("COPIES").messages == len(NODES)
        rig.entries[0]["source_url"] = f"{bound}?inbox_prefix=mine.inbox"
        rig.entries[0] |= {"target_url": bound, "target_stream": "NEW"}
        monkeypatch.setenv("SR_ASSETS_CONFIG", str(rig.home / "replication.yaml"))
        rig.settings()
        assert run_command(("check", "--connect", "--format", "json")) == 1
        links = {(row["tried"], row["result"]): row["learned"] for row in json.loads(capsys.readouterr().out)}
        assert ("fleet.JS.API.CONSUMER.CREATE." + stream, "ok") in links
        assert "set inbox_prefix in the URL" in links["$JS.API.STREAM.INFO.NEW", "failed"]
        rig.entries[0]["target_url"] = f"{bound}?inbox_prefix=mine.inbox"
        rig.settings()
        assert run_command(("check", "--connect")) == 1
        errors = capsys.readouterr().err
        assert '$js.api.stream.create.new"; give the user that permission' in errors.lower(), errors
