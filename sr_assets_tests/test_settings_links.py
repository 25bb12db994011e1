"""The keys of links and targets: domains, TLS, Choria, heartbeats; and the errors about them."""

import os
from pathlib import Path

import pytest

from sr_assets.adapters.security import exposed_secrets, forgeable_files
from sr_assets.cli.warnings import _exposed, _has_secret
from sr_assets.domain.errors import ConfigurationError
from sr_assets.settings import ChoriaSettings, Settings, TlsSettings, load_settings
from sr_assets_tests.strangers import STRANGER, need_root

STREAM = "{stream: REG, source_url: city, target_url: centre%s}"


def load(folder: Path, keys: str = "", top: str = "") -> Settings:
    """Load one stream with additional keys, and keys of the top level."""
    file = folder / "replication.yaml"
    file.write_text(f"name: EAST\n{top}\nstreams: [{STREAM % (keys and f', {keys}')}]\n")
    return load_settings(file, {})


def refusal(folder: Path, keys: str = "", top: str = "") -> str:
    """Load an invalid configuration; return the error without the file and the stream."""
    with pytest.raises(ConfigurationError) as caught:
        load(folder, keys, top)
    line = str(caught.value)
    assert "\n" not in line
    return line.partition("replication.yaml: ")[2].removeprefix("stream 'REG': ")


def test_link_uses_the_jetstream_of_its_domain_or_prefix(tmp_path: Path) -> None:
    (stream,) = load(tmp_path, "source_domain: leaf, target_api_prefix: fleet.JS.API.").streams
    assert stream.source.api("STREAM.NAMES") == "$JS.leaf.API.STREAM.NAMES"
    assert stream.target.api("STREAM.NAMES") == "fleet.JS.API.STREAM.NAMES"
    (feed,) = load(tmp_path, top="feeds: [{stream: ADV, url: 'hub?inbox_prefix=in.box', domain: hub}]").feeds
    assert (feed.source.api("INFO"), feed.source.inbox_prefix) == ("$JS.hub.API.INFO", "in.box")
    assert [link.api_owner for link in (stream.source, stream.target)] == ["domain leaf", "API prefix fleet.JS.API"]


@pytest.mark.parametrize(
    ("keys", "message"),
    (
        ("source_domain: a.b", "source_domain: 'a.b' is not a JetStream domain"),
        ("source_domain: '*'", "source_domain: '*' is not a subject"),
        ("target_api_prefix: '$JS.>'", "target_api_prefix: '$JS.>' is not a subject"),
        ("target_domain: a, target_api_prefix: b", "target_domain, target_api_prefix: exclude each other"),
    ),
)
def test_invalid_domain_or_api_prefix_is_refused(keys: str, message: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, keys).startswith(message)


def test_inbox_prefix_with_wildcard_is_refused(tmp_path: Path) -> None:
    line = refusal(tmp_path, top="feeds: [{stream: ADV, url: 'hub?inbox_prefix=a.>'}]")
    assert "inbox_prefix in the URL is not the beginning of a subject" in line


CHORIA = "choria: {seed_file: /s, jwt_file: /j, collective: c}"
LOGIN = ChoriaSettings("/s", "/j", "c")


def test_choria_and_tls_blocks_are_inherited_or_disabled_as_a_whole(tmp_path: Path) -> None:
    top = f"{CHORIA}\ntls: {{ca: /ca}}\nfeeds: [{{stream: ADV, url: hub, choria: {{}}}}]"
    settings = load(tmp_path, "target_choria: {}, source_tls: {}", top)
    (stream,), (feed,) = settings.streams, settings.feeds
    assert (stream.source.choria, stream.source.tls) == (LOGIN, TlsSettings())
    assert (stream.target.choria, stream.target.tls) == (None, TlsSettings(ca="/ca"))
    assert (feed.source.choria, feed.source.tls) == (None, TlsSettings(ca="/ca"))
    own = "source_choria: {seed_file: /s2, jwt_file: /j2, collective: d}"
    assert load(tmp_path, own, top).streams[0].source.choria == ChoriaSettings("/s2", "/j2", "d")
    assert load(tmp_path, "choria: {}", top).streams[0].source.choria is None


def test_warning_names_links_that_choria_would_not_verify(tmp_path: Path) -> None:
    (line,) = load(tmp_path, "target_choria: {}", CHORIA).warnings
    assert "choria without tls.ca (city:4222): the server's certificate is verified" in line
    assert load(tmp_path, "source_tls: {ca: /ca}, target_choria: {}", CHORIA).warnings == ()


def test_exposed_secrets_are_files_that_everyone_can_read(tmp_path: Path) -> None:
    seed, key = tmp_path / "seed", tmp_path / "key.pem"
    for file, mode in ((seed, 0o644), (key, 0o640)):
        file.write_text("")
        file.chmod(mode)
    keys = (
        f"choria: {{seed_file: {seed}, jwt_file: /nowhere, collective: c}}, tls: {{ca: /ca, cert: /cert, key: {key}}}"
    )
    (stream,) = load(tmp_path, keys).streams
    assert exposed_secrets(stream.source) == [str(seed)]
    key.chmod(0o604)
    assert exposed_secrets(stream.target) == [str(seed), str(key)]


def test_exposed_key_of_consul_is_named_like_that_of_a_cluster(tmp_path: Path) -> None:
    ca, key = tmp_path / "ca.pem", tmp_path / "key.pem"
    for file, mode in ((ca, 0o646), (key, 0o644)):
        file.write_text("")
        file.chmod(mode)
    tls = f"tls: {{ca: {ca}, cert: /cert, key: {key}}}"
    settings = load(tmp_path, top=f"data: {{ops: {{type: consul, url: 'https://c.example', {tls}}}}}")
    warnings = list(_exposed(settings))
    assert [line.partition(":")[0] for line in warnings] == [str(key), str(ca)]
    key.chmod(0o640)
    ca.chmod(0o644)
    assert not list(_exposed(settings))


def test_forgeable_files_are_those_that_others_can_write(tmp_path: Path) -> None:
    ca, key = tmp_path / "ca.pem", tmp_path / "key.pem"
    for file, mode in ((ca, 0o644), (key, 0o602)):
        file.write_text("")
        file.chmod(mode)
    (stream,) = load(tmp_path, f"tls: {{ca: {ca}, cert: /cert, key: {key}}}").streams
    assert list(forgeable_files(stream.source)) == [str(key)]
    ca.chmod(0o666)
    assert list(forgeable_files(stream.target)) == [str(key), str(ca)]
    need_root()
    for file, mode, owner in ((ca, 0o664, (0, STRANGER)), (key, 0o600, (STRANGER, 0))):
        os.chown(file, *owner)
        file.chmod(mode)
    writers = forgeable_files(stream.source)
    assert writers[str(ca)].startswith("group ")
    assert writers[str(key)].startswith(f"{key} belongs to ")
    # A group may read.
    os.chown(key, 0, STRANGER)
    key.chmod(0o640)
    assert list(forgeable_files(stream.source)) == [str(ca)]


@pytest.mark.parametrize(
    ("written", "secret"),
    (
        ({"streams": [{"source_url": "nats://sr:hunter2@a:4222"}]}, True),
        ({"streams": [{"source_url": "nats://sr:${PASSWORD}@a:4222"}]}, False),
        ({"streams": [{"source_url": "nats://a:4222"}]}, False),
        ({"notify": [{"email": {"Password": "hunter2"}}]}, True),
        ({"notify": [{"email": {"password": "${MAIL}"}}]}, False),
        ({"data": {"c": {"token": {"data": "host/TOKEN"}}}}, False),
    ),
)
def test_configuration_with_a_password_in_clear_is_recognised(written: object, secret: bool) -> None:
    assert _has_secret(written) is secret


def test_puppet_scheme_finds_tls_files_in_ssl_dir(tmp_path: Path) -> None:
    tls = "tls: {scheme: puppet, ssl_dir: /ssl, identity: sr.example.net}"
    (stream,) = load(tmp_path, "disable_target_tls: true", tls).streams
    pem = "sr.example.net.pem"
    assert stream.source.tls == TlsSettings("/ssl/certs/ca.pem", f"/ssl/certs/{pem}", f"/ssl/private_keys/{pem}")
    assert stream.target.tls is None
    (stream,) = load(tmp_path, "tls: {scheme: manual, ca: /ca, identity: sr}, disable_source_tls: true").streams
    assert (stream.source.tls, stream.target.tls) == (None, TlsSettings("/ca"))


@pytest.mark.parametrize(
    ("keys", "message"),
    (
        ("choria: {seed_file: /s}", "choria: needs jwt_file and collective too"),
        ("choria: {seed_file: /s, jwt_file: /j}", "choria: needs collective too"),
        ("choria: {seed_file: /s, jwt_file: /j, collective: 'a.>'}", "choria.collective: 'a.>' is not a subject"),
        ("choria: {seed: /s}", "choria: unknown key 'seed'; did you mean 'seed_file'?"),
        ("tls: {scheme: puppet, ssl_dir: /ssl}", "tls: scheme: puppet needs ssl_dir and identity"),
        ("tls: {scheme: puppet, ssl_dir: /ssl, identity: ../x}", "tls.identity: '../x' is not a certificate name"),
        ("tls: {scheme: puppet, ssl_dir: /ssl, identity: x, ca: /ca}", "tls: scheme: puppet finds ca, cert and key"),
        ("tls: {scheme: pki}", "tls.scheme: 'pki' is not one of puppet, manual, file"),
        ("tls: {scheme: file}", "tls: scheme: file needs the files"),
        ("tls: {ssl_dir: /ssl}", "tls: ssl_dir: needs scheme: puppet"),
        (f"disable_source_tls: true, {CHORIA}", "disable_source_tls: contradicts choria"),
    ),
)
def test_invalid_security_block_is_refused(keys: str, message: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, keys).startswith(message)


def test_choria_token_with_another_login_is_refused(tmp_path: Path) -> None:
    feed = "feeds: [{stream: ADV, url: 'nats://me:hunter2@hub'}]"
    line = refusal(tmp_path, top=f"{CHORIA}\n{feed}")
    assert line.startswith("stream 'ADV': choria: logs in with its token; remove the login from the URL")
    assert "hunter2" not in line


BEATS = "heartbeats: {url: 'nats://hub', subjects: [{subject: a.b}%s]%s}"


def test_heartbeats_have_their_own_links_and_default_interval(tmp_path: Path) -> None:
    more = ", {subject: c, interval: 1m, headers: {B: own}}"
    heartbeats = load(tmp_path, top=f"{CHORIA}\n{BEATS % (more, ', headers: {A: x, B: y}')}").heartbeats
    assert heartbeats is not None
    assert (heartbeats.cluster.choria, heartbeats.cluster.label) == (None, "hub:4222")
    assert [(subject.subject, subject.interval_ns, dict(subject.headers)) for subject in heartbeats.subjects] == [
        ("a.b", 10**10, {"A": "x", "B": "y"}),
        ("c", 60 * 10**9, {"A": "x", "B": "own"}),
    ]
    settings = load(tmp_path, top=BEATS % ("", ", leader_election: true"))
    assert settings.warnings == ()
    assert settings.heartbeats is not None
    assert settings.heartbeat_election_cluster(settings.heartbeats) == settings.heartbeats.cluster
    other = "leader_election: {cluster: 'nats://other'}"
    settings = load(tmp_path, top=f"{BEATS % ('', ', leader_election: true')}\n{other}")
    assert settings.heartbeats is not None
    assert settings.heartbeat_election_cluster(settings.heartbeats).label == "other:4222"


@pytest.mark.parametrize(
    ("block", "message"),
    (
        ("{subjects: [{subject: a}]}", "heartbeats.url: is required"),
        ("{url: hub, subjects: []}", "heartbeats.subjects: "),
        ("{url: hub, subjects: [{interval: 1s}]}", "heartbeats.subjects.0.subject: is required"),
        ("{url: hub, interval: 0s, subjects: [{subject: a}]}", "heartbeats.interval: '0s' must be longer than zero"),
        ("{url: hub, subjects: [{subject: a.*}]}", "heartbeats.subjects.0.subject: 'a.*' is not a subject"),
        ("{url: hub, subjects: [{subject: a, headers: {'a b': c}}]}", "heartbeats.subjects.0.headers: 'a b' is not a"),
        (
            "{url: hub, subjects: [{subject: a}], headers: {choria-sr-subject: c}}",
            "heartbeats.headers: choria-sr-subject",
        ),
        ("{url: 'a@hub', subjects: [{subject: a}], " + CHORIA + "}", "heartbeats: choria: logs in with its token"),
    ),
)
def test_invalid_heartbeats_are_refused(block: str, message: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, top=f"heartbeats: {block}").startswith(message)


def test_target_block_sets_target_options(tmp_path: Path) -> None:
    block = (
        "{subjects: [a.>], storage: MEMORY, replicas: 3, retention: interest, max_age: 1d, max_bytes: 1GiB, max_msgs: 9,"
        " max_msgs_per_subject: 2, max_msg_size: 5KiB, discard: new, duplicate_window: 1h, compression: s2,"
        " allow_direct: false, deny_delete: true, deny_purge: true, placement: {cluster: e, tags: [a]}}"
    )
    (stream,) = load(tmp_path, f"target: {block}").streams
    assert stream.target_options is not None
    assert stream.target_options.wanted == {
        "subjects": ["a.>"],
        "storage": "memory",
        "num_replicas": 3,
        "retention": "interest",
        "max_age": 86_400 * 10**9,
        "max_bytes": 1 << 30,
        "max_msgs": 9,
        "max_msgs_per_subject": 2,
        "max_msg_size": 5 << 10,
        "discard": "new",
        "duplicate_window": 3600 * 10**9,
        "compression": "s2",
        "allow_direct": False,
        "deny_delete": True,
        "deny_purge": True,
        "placement": {"cluster": "e", "tags": ["a"]},
    }
    assert load(tmp_path, "target: {}").streams[0].target_options is None


@pytest.mark.parametrize("unlimited", ("unlimited", "UNLIMITED", "-1", "0"))
def test_target_limits_can_be_unlimited(tmp_path: Path, unlimited: str) -> None:
    limits = ("max_age", "max_bytes", "max_msgs", "max_msgs_per_subject", "max_msg_size")
    block = ", ".join(f"{key}: {unlimited}" for key in limits)
    (stream,) = load(tmp_path, f"target: {{{block}}}").streams
    assert stream.target_options is not None
    assert stream.target_options.wanted == dict.fromkeys(limits, -1) | {"max_age": 0}


@pytest.mark.parametrize(
    ("keys", "message"),
    (
        ("target: {storage: disk}", "target.storage: 'disk' is not one of file, memory"),
        ("target: {replicas: 7}", "target.replicas: 7 is not a whole number, 1 to 5"),
        ("target: {max_age: x}", "target.max_age: 'x' is not a duration"),
        ("target: {max_msgs: -2}", "target.max_msgs: -2 is not a whole number, 1 or more, or unlimited"),
        ("target: {max_bytes: many}", "target.max_bytes: 'many' is not a size"),
        ("target: {max_age: 1m, duplicate_window: 2m}", "target: duplicate_window 120s is longer than max_age 60s"),
        ("target: {persist: async, replicas: 3}", "target: persist async is for one replica on files"),
        ("target: {persist: async, storage: memory}", "target: persist async is for one replica on files"),
        ("target: {persist: sync}", "target.persist: 'sync' is not one of default, async"),
        ("target: {placement: {tags: ssd}}", "target.placement.tags: must be a list"),
        ("target: {subject: [a]}", "target: unknown key 'subject'"),
        ("target: {subjects: ['a b']}", "target.subjects.0: 'a b' is not a"),
        ("target: {replicas: 1}, no_target_create: true", "target: configures a new target"),
    ),
)
def test_invalid_target_block_is_refused(keys: str, message: str, tmp_path: Path) -> None:
    assert refusal(tmp_path, keys).startswith(message)
