"""`import`: conversion of an old replicator's file into a configuration with open questions."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.embedded.nats_server import NatsServer
from sr_assets.settings import TlsSettings, load_settings
from sr_assets.settings.names import PLACEHOLDER
from sr_assets_tests.rig import Command, address

#: Keys from the old replicator's package and documents.
OLD = """
debug: true
verbose: true
logfile: /var/log/stream-replicator.log
state_dir: /var/lib/stream-replicator
tls: {identity: sr.example.net, scheme: puppet, ssl_dir: /etc/stream-replicator/ssl}
topics:
  cmdb:
    topic: acme.cmdb
    source_url: nats://source1.example.net:4222,nats://source2.example.net:4222
    source_cluster_id: dc1
    target_url: nats://me:hunter2@target1.example.net:4222
    target_cluster_id: dc2
    workers: 10
    queued: true
    queue_group: cmdb
    inspect: sender
    age: 1h
    update_flag: updated
    monitor: 10000
    advisory: {target: sr.advisories.cmdb, cluster: source, age: 30m}
  jobs:
    name: jobs_copy
    topic: acme.jobs.>
    source_cluster_id: dc1
    target_url: nats://target1.example.net:4222
    target_cluster_id: dc2
    workers: 2
    age: 1h
    monitor: 10001
    wrokers: 5
    disable_target_tls: true
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """An old replicator's file."""
    file = tmp_path / "sr.yaml"
    file.write_text(OLD)
    return file


def test_import_maps_or_explains_every_key(old: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    new = old.with_name("replication.yaml")
    code, output, errors = command("import", str(old), "-o", str(new))
    assert (code, output) == (0, "")
    assert new.stat().st_mode & 0o777 == 0o600
    text = new.read_text()
    arguments = [line.removeprefix("open: ") for line in errors.splitlines()]
    assert [line.partition(":")[0] for line in arguments] == [
        "name",
        "topics.cmdb.stream",
        "topics.jobs.stream",
    ]
    comment = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    assert all(question in comment for question in arguments)
    known = "debug verbose logfile state_dir tls topic source_cluster_id target_cluster_id workers queued queue_group"
    for key in (
        *known.split(),
        *["inspect", "age", "update_flag", "monitor", "advisory", "wrokers", "disable_target_tls"],
    ):
        assert key in comment, key
    assert "hunter2" not in comment + errors
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(new))
    code, _, errors = command("check")
    assert code == 2
    assert f"stream: '{PLACEHOLDER}acme.cmdb' is a placeholder of `import`" in errors
    new.write_text(text.replace(f"{PLACEHOLDER}acme.cmdb", "CMDB").replace(f"{PLACEHOLDER}acme.jobs.>", "JOBS"))
    settings = load_settings(new, {})
    cmdb, jobs = settings.streams
    assert settings.loglevel == "debug"
    assert (settings.metrics.port, settings.metrics.legacy) == (10000, True)
    assert cmdb.name == "cmdb_acme_cmdb_stream_replicator"
    assert (cmdb.filter_subject, cmdb.target_stream, cmdb.workers, cmdb.order) == ("acme.cmdb", "CMDB", 10, "sender")
    assert cmdb.policy is not None
    assert (cmdb.policy.interval_ns, cmdb.policy.warning_ns) == (3600 * 10**9, 1800 * 10**9)
    assert cmdb.force_path == ("updated",)
    assert cmdb.advisory is not None
    assert (cmdb.advisory.subject, cmdb.advisory.cluster, cmdb.advisory.format) == (
        "sr.advisories.cmdb",
        "source",
        "v1",
    )
    ssl = "/etc/stream-replicator/ssl"
    pem = "sr.example.net.pem"
    assert cmdb.source.tls == TlsSettings(f"{ssl}/certs/ca.pem", f"{ssl}/certs/{pem}", f"{ssl}/private_keys/{pem}")
    assert (jobs.name, jobs.source.servers, jobs.order) == ("jobs_copy", ("localhost:4222",), "none")
    assert (jobs.policy, jobs.target.tls) == (None, None)
    assert command("import", str(old), "-o", str(new))[0] == 2
    assert command("import", str(old))[1] == text


def test_import_sets_the_name_and_makes_the_entries_distinct(old: Path, command: Command) -> None:
    topic = {"topic": "a.>", "target_url": "nats://127.0.0.1:1", "name": "copy"}
    topics = {"one": topic, "two": {**topic, "topic": "b.>"}, "three": {**topic, "topic": "c.>", "name": "copy_2"}}
    old.write_text(yaml.safe_dump({"topics": topics}))
    code, output, errors = command("import", str(old), "--name", "EAST")
    document = yaml.safe_load(output)
    assert (code, document["name"]) == (0, "EAST")
    assert sorted(entry["name"] for entry in document["streams"]) == ["copy", "copy_2", "copy_3"]
    assert "open: name" not in errors


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("topics: {}", "has no topics"),
        ("name: X\nstreams: []\n", "has streams: it is the current Stream Replicator's file"),
        ("topics: {a: {target_url: b}}", "topics.a: has no topic"),
        ("topics: {a: {topic: b}}", "topics.a: has no target_url"),
        ("topics: {a: b}", "topics.'a': must be a mapping"),
        ("tls: on\ntopics: {a: {topic: b, target_url: c}}", "tls: must be a mapping"),
        ("topics: {a: {topic: b, target_url: c, inspect: s, age: 1h, advisory: d}}", "advisory: must be a mapping"),
        ("- a", "must be a mapping"),
    ),
)
def test_import_of_invalid_file_is_one_error_line(old: Path, command: Command, text: str, message: str) -> None:
    old.write_text(text)
    code, output, errors = command("import", str(old))
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1
    assert message in errors
    assert str(old) in errors


def test_import_names_invalid_url(tmp_path: Path, command: Command) -> None:
    topics = {"a": {"topic": "a.>", "source_url": "http://127.0.0.1:1", "target_url": "nats://127.0.0.1:1"}}
    (tmp_path / "sr.yaml").write_text(yaml.safe_dump({"topics": topics}))
    code, _, errors = command("import", str(tmp_path / "sr.yaml"), "--connect")
    assert code == 0
    assert "the stream that takes a.>: source_url: the URL must begin with nats://" in errors


@pytest.mark.process
def test_import_finds_streams_by_topic_subject(
    tmp_path: Path, command: Command, nats_server: NatsServer, unique: Callable[[str], str]
) -> None:
    single, several = unique("ONE"), unique("OTHER")
    topics = {
        name: {"topic": f"{name}.a.>", "source_url": nats_server.url, "target_url": nats_server.url}
        for name in (single, several)
    }
    topics[several] |= {"target_url": "nats://127.0.0.1:1", "name": "other"}
    (tmp_path / "sr.yaml").write_text(yaml.safe_dump({"topics": topics}))
    with Cluster(address(nats_server), "test") as opened:
        opened.create_stream({"name": single, "subjects": [f"{single}.>"]})
        for number in (1, 2):
            opened.create_stream({"name": f"{several}_{number}", "subjects": [f"{several}.a.{number}"]})
    code, output, errors = command("import", str(tmp_path / "sr.yaml"), "--connect")
    assert code == 0
    first, second = yaml.safe_load(output)["streams"]
    assert (first["stream"], first["target_stream"]) == (single, single)
    assert second["stream"] == f"{PLACEHOLDER}{several}.a.>"
    assert "target_stream" not in second
    assert f"several streams of the source take {several}.a.>: {several}_1, {several}_2" in errors
    assert "other: the target could not be queried" in errors
    assert f"topics.{single}" not in errors
