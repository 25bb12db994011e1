"""The configuration: keys and their effects, the environment, invalid values, contradictions between keys."""

import os
import pickle
import re
from pathlib import Path
from typing import Any, Protocol

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sr_assets.domain.errors import ConfigurationError
from sr_assets.domain.senders import HeaderName, JsonField, SubjectToken
from sr_assets.domain.tracking.rules import Policy
from sr_assets.settings import (
    ClusterSettings,
    Settings,
    SparkSettings,
    Start,
    StreamSettings,
    TlsSettings,
    load_settings,
    parse_cluster,
    parse_duration,
)

SECOND_NS = 1_000_000_000
HOUR_NS = 3600 * SECOND_NS
DAY_NS = 24 * HOUR_NS

TOP = "name: EAST\n"
STREAM = "streams:\n- {stream: REG, source_url: city:4222, target_url: centre:4222%s}\n"
SAMPLED = "inspect_field: sender, inspect_duration: 1h"


class Load(Protocol):
    """Load a file's text."""

    def __call__(self, text: str, **environ: str) -> Settings:
        """Load a file's text."""
        ...


class LoadStream(Protocol):
    """Load one stream with additional keys."""

    def __call__(self, keys: str = "", **environ: str) -> StreamSettings:
        """Load one stream."""
        ...


class Refusal(Protocol):
    """Load an invalid configuration, and return the error."""

    def __call__(self, text: str, **environ: str) -> str:
        """Return the line."""
        ...


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Return a function that writes a file's text and loads it, without the process's environment."""
    path = tmp_path / "replication.yaml"

    def write_and_load(text: str, **environ: str) -> Settings:
        path.write_text(text)
        return load_settings(path, environ)

    return write_and_load


@pytest.fixture
def stream(load: Load) -> LoadStream:
    """Return a function that loads one stream with additional keys."""

    def load_stream(keys: str = "", **environ: str) -> StreamSettings:
        return load(TOP + STREAM % (keys and f", {keys}"), **environ).streams[0]

    return load_stream


@pytest.fixture
def refusal(load: Load) -> Refusal:
    """Return a function that loads an invalid file and returns the error without the file's path."""

    def load_and_fail(text: str, **environ: str) -> str:
        with pytest.raises(ConfigurationError) as caught:
            load(text, **environ)
        line = str(caught.value)
        assert "\n" not in line
        assert "replication.yaml: " in line
        # A cause would show values in a traceback.
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        return line.partition("replication.yaml: ")[2]

    return load_and_fail


@pytest.fixture
def stream_refusal(refusal: Refusal) -> Refusal:
    """Return a function that loads one invalid stream and returns the error without the stream."""

    def load_and_fail(text: str, **environ: str) -> str:
        line = refusal(TOP + STREAM % f", {text}", **environ)
        assert line.startswith("stream 'REG': ")
        return line.removeprefix("stream 'REG': ")

    return load_and_fail


@pytest.mark.parametrize(
    ("text", "ns"),
    (
        ("250ms", SECOND_NS // 4),
        ("90s", 90 * SECOND_NS),
        ("12m", 720 * SECOND_NS),
        ("1h", HOUR_NS),
        ("2d", 2 * DAY_NS),
        ("1w", 7 * DAY_NS),
        ("1M", 720 * HOUR_NS),
        ("1y", 8760 * HOUR_NS),
        ("1Y", 8760 * HOUR_NS),
        ("0.01d", 864 * SECOND_NS),
        ("0.5w", 84 * HOUR_NS),
        (".5M", 360 * HOUR_NS),
        ("1h30m", 90 * 60 * SECOND_NS),
        ("1d12h", 36 * HOUR_NS),
        ("1M1m", 720 * HOUR_NS + 60 * SECOND_NS),
    ),
)
def test_duration_is_one_number_with_unit_or_a_sum(text: str, ns: int) -> None:
    assert parse_duration(text) == ns


@pytest.mark.parametrize(
    "text", ("", "5", "h", "5 parsecs", "-1h", "1h 30m", "1h-30m", "1e3s", "1..5d", "\u096bs", "999999Y")
)
def test_invalid_duration_is_shown_in_the_error(text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(repr(text))):
        parse_duration(text)


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 9999), st.integers(0, 99999))
def test_duration_of_a_sum_is_the_sum_of_its_parts(days: int, hours: int, minutes: int, seconds: int) -> None:
    parts = (f"{days}d", f"{hours}h", f"{minutes}m", f"{seconds}s")
    assert parse_duration("".join(parts)) == sum(parse_duration(part) for part in parts)


@pytest.mark.parametrize(
    ("url", "servers"),
    (
        ("host", ("host:4222",)),
        ("nats://host", ("host:4222",)),
        ("NATS://Host:5222/", ("host:5222",)),
        ("nats://a:1,b:2, c", ("a:1", "b:2", "c:4222")),
        ("nats://a:1, nats://a:1", ("a:1",)),
        ("[::1]:4333", ("[::1]:4333",)),
        ("nats://[2001:DB8:0::7]", ("[2001:db8::7]:4222",)),
    ),
)
def test_url_has_servers_with_default_port_4222(url: str, servers: tuple[str, ...]) -> None:
    assert parse_cluster(url) == ClusterSettings(servers)


def test_url_login_is_percent_decoded_and_applies_to_all_servers() -> None:
    cluster = parse_cluster("nats://me:p%40ss%2Fw%2C@a,b")
    assert (cluster.servers, cluster.user, cluster.password, cluster.token) == (
        ("a:4222", "b:4222"),
        "me",
        "p@ss/w,",
        None,
    )


def test_url_login_without_colon_is_a_token() -> None:
    assert parse_cluster("s%3Acret@host").token == "s:cret"


def test_url_credential_files_apply_to_all_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = parse_cluster("nats://a,b?credentials=keys/me%2c.creds")
    assert cluster == ClusterSettings(("a:4222", "b:4222"), credentials=str(tmp_path / "keys/me,.creds"))
    assert parse_cluster("a?JWT=/j&nkey=/n") == ClusterSettings(("a:4222",), jwt="/j", nkey="/n")
    assert parse_cluster("t0ken@a?nkey=/n") == ClusterSettings(("a:4222",), token="t0ken", nkey="/n")
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_cluster("a?credentials=~/me.creds").credentials == "/home/me/me.creds"


@pytest.mark.parametrize(
    ("url", "tls"),
    (
        ("nats://a", None),
        ("nats://a?insecure=false&tls_handshake_first=false", None),
        ("tls://a", TlsSettings()),
        ("TLS://a,nats://b", TlsSettings()),
        ("nats://a?tls_handshake_first=true", TlsSettings(handshake_first=True)),
        ("tls://a?insecure=True", TlsSettings(insecure=True)),
        ("a,b?tls_handshake_first=true&insecure=true", TlsSettings(handshake_first=True, insecure=True)),
    ),
)
def test_url_scheme_and_options_require_tls(url: str, tls: TlsSettings | None) -> None:
    assert parse_cluster(url).tls == tls


def test_url_sets_connect_timeout() -> None:
    assert parse_cluster("nats://a,b?connect_timeout=1500ms").connect_timeout_seconds == 1.5


@pytest.mark.parametrize(
    ("url", "message"),
    (
        ("wss://u:hunter2@host", "wss:// is not supported"),
        ("http://u:hunter2@host", "must begin with nats://"),
        (
            "nats://u:hunter2@host?credentials=/x/hunter2.creds",
            "user:password@ and a credentials file exclude each other",
        ),
        ("nats://u:hunter2@host?jwt=/a&nkey=/b", "user:password@ and a credentials file exclude each other"),
        ("nats://u:hunter2@host?nkey=/b", "user:password@ and a credentials file exclude each other"),
        ("nats://hunter2@host?credentials=/a&jwt=/b", "credentials already contains jwt and nkey"),
        ("nats://hunter2@host?credentials=/a&nkey=/b", "credentials already contains jwt and nkey"),
        ("nats://hunter2@host?jwt=/b", "jwt needs nkey"),
        ("nats://host?credentials=", "credentials in the URL is not the path of a file"),
        ("nats://host?nkey=~hunter2nobody/x", "nkey in the URL is not the path of a file"),
        ("nats://u:hunter2@host?tls_handshake_first=hunter2", "tls_handshake_first in the URL is not true or false"),
        ("nats://u:hunter2@host?insecure=1", "insecure in the URL is not true or false"),
        ("nats://host?credentials=/hunter2,other?credentials=/b", "credentials differs between the servers"),
        ("nats://a?insecure=true,b?insecure=false", "insecure differs between the servers"),
        ("nats://u:hunter2@host?hunter2=1", "unknown option"),
        ("nats://host?connect_timeout=hunter2", "connect_timeout in the URL is not a duration"),
        ("nats://u:hunter2/x@host", "may follow host:port"),
        ("u:hunter2", "host:port"),
        ("u:99999", "between 1 and 65535"),
        ("nats://u:hunter2@host:x", "host:port"),
        ("nats://u:hunt,er2@host", "host:port"),
        ("nats://:hunter2@host", "the user or token before the @ is missing"),
        ("nats://u:hunter2@a,v:hunter2@b", "login differs between the servers"),
        ("nats://a?connect_timeout=1s,b?connect_timeout=2s", "connect_timeout differs"),
        ("nats://::1:4222", "host:port"),
        ("nats://[::zz]", "host:port"),
        ("nats://[1:2]", "not IPv6"),
        ("a,,b", "host:port"),
        ("nats://", "host:port"),
    ),
)
def test_invalid_url_is_refused_without_showing_any_of_it(url: str, message: str, refusal: Refusal) -> None:
    line = refusal(f"name: EAST\nstreams:\n- {{stream: REG, source_url: '{url}', target_url: centre}}")
    assert line.startswith("stream 'REG': source_url: ")
    assert message in line
    assert "hunter2" not in line


@pytest.mark.parametrize(
    "keys", ("target_stream: nats://me:hunter2@city", "nats://me:hunter2@city: 1", "workers: me:hunter2@city:4222")
)
def test_url_as_value_of_another_key_is_shown_without_login(keys: str, stream_refusal: Refusal) -> None:
    assert "hunter2" not in stream_refusal(keys)


@pytest.mark.parametrize(
    ("top", "keys", "source", "target"),
    (
        ("", "", None, None),
        ("/top", "", "/top", "/top"),
        ("/top", "tls: {ca: /own}", "/own", "/own"),
        ("", "source_tls: {ca: /source}", "/source", None),
        ("/top", "target_tls: {ca: /target}", "/top", "/target"),
        ("/top", "tls: {ca: /own}, source_tls: {CA: /source}", "/source", "/own"),
        ("/top", "tls: {ca: ''}", None, None),
        ("/top", "source_tls: {}", None, "/top"),
        ("/top", "tls: null", "/top", "/top"),
    ),
)
def test_tls_block_is_inherited_as_a_whole_and_may_be_empty(
    top: str, keys: str, source: str | None, target: str | None, load: Load
) -> None:
    block = f"tls: {{ca: {top}, cert: /c, key: /k}}\n" if top else ""
    entry = load(TOP + block + STREAM % (keys and f", {keys}")).streams[0]
    for cluster, ca in ((entry.source, source), (entry.target, target)):
        inherited: dict[str, Any] = {"cert": "/c", "key": "/k"} if ca == "/top" else {}
        assert cluster.tls == (TlsSettings(ca, **inherited) if ca else None)


def test_tls_block_and_url_options_are_combined(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = TOP + "tls: {cert: c.pem, key: c.key}\nstreams:\n- {stream: A, source_url: 'a?tls_handshake_first=true', "
    entry = load(text + "target_url: 'tls://b?insecure=true'}").streams[0]
    files: dict[str, Any] = {"cert": str(tmp_path / "c.pem"), "key": str(tmp_path / "c.key")}
    assert entry.source.tls == TlsSettings(**files, handshake_first=True)
    assert entry.target.tls == TlsSettings(**files, insecure=True)


def test_feed_has_its_own_tls_block_or_inherits_it(load: Load) -> None:
    feeds = "feeds: [{stream: A, url: 'tls://a?nkey=/n'}, {stream: B, url: a, tls: {ca: /own}}]\n"
    inheriting, own = load(TOP + "tls: {ca: /top}\n" + feeds).feeds
    assert inheriting.source == ClusterSettings(("a:4222",), nkey="/n", tls=TlsSettings("/top"))
    assert own.source.tls == TlsSettings("/own")


def test_digest_depends_on_login_and_tls_files(load: Load) -> None:
    files = [
        TOP + STREAM % more for more in ("", ", tls: {ca: /a}", ", tls: {ca: /b}", ", target_tls: {cert: /c, key: /k}")
    ]
    files += [
        TOP + f"streams: [{{stream: REG, source_url: '{url}', target_url: 'centre:4222'}}]"
        for url in ("tls://city", "city?credentials=/a", "city?nkey=/a", "city?jwt=/j&nkey=/a")
    ]
    assert len({load(text).digest for text in files}) == len(files)


def test_repr_and_digest_contain_no_secret(load: Load) -> None:
    text = TOP + "spark: {mode: 'sc://h:15002/;token=%s', config: {spark.ssl.keyPassword: %s, spark.a: b}}\n"
    text += "streams: [{stream: REG, source_url: 'nats://me:%s@city', target_url: '%s@centre'}]"
    settings, other = (load(text % ((secret,) * 4)) for secret in ("hunter2", "swordfish"))
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in settings.streams[0].source.label
    assert settings.streams[0].source.password == settings.streams[0].target.token == "hunter2"
    assert settings.digest == other.digest
    assert settings != other


def test_smallest_file_has_the_documented_defaults(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load(TOP + STREAM % "")
    assert (settings.replicator, settings.home) == ("EAST", tmp_path / ".sr_assets")
    assert (settings.concurrency, settings.metrics.port, settings.topology) == (os.cpu_count(), None, None)
    entry = settings.streams[0]
    assert (entry.replicator, entry.label, entry.target_stream) == ("EAST", "EAST/REG", "REG")
    assert entry.clusters == (ClusterSettings(("city:4222",)), ClusterSettings(("centre:4222",)))
    assert (entry.batch_messages, entry.batch_bytes, entry.workers, entry.order) == (50_000, 64 << 20, 1, "stream")
    assert (entry.on_poison, entry.on_source_reset, entry.on_target_reset) == ("park", "stop", "continue")
    assert (entry.tracked, entry.create_target, entry.start) == (False, True, Start("all"))
    assert (settings.run_budget_ns, settings.linger_ns) == (300 * SECOND_NS, 60 * SECOND_NS)
    assert (settings.sensor.interval_ns, settings.sensor.lag_messages, settings.sensor.lag_ns) == (30 * SECOND_NS, 1, 0)
    assert (settings.spark, settings.warnings) == (SparkSettings(), ())
    assert settings.snapshots == settings.advisories == settings.gaps
    assert (settings.gaps.retention_ns, entry.retired_retention_ns) == (90 * DAY_NS, None)


def test_every_key_sets_its_field(load: Load) -> None:
    settings = load(
        """
        Name: US-EAST
        STATE_STORE: /var/lib/sr
        loglevel: Debug
        logfile: /var/log/sr.log
        published_mode: '0640'
        run_budget: 10m
        linger: 5s
        spark: {mode: classic, config: {spark.driver.memory: 2g, spark.ui.enabled: false, spark.cores.max: 4}}
        sensor: {interval: 10s, lag_messages: 100, lag_seconds: 1.5}
        snapshots: {retention: 1M}
        gaps: {retention: 1w}
        streams:
          - Stream: REG
            NAME: city.one
            source_URL: nats://city
            target_url: nats://centre
            target_stream: FLEET
            target_subject_prefix: fleet
            target_subject_remove: in.
            filter_subject: in.reg.>
            no_target_create: true
            max_age: 2h
            inspect_field: a\\.b.0
            inspect_force_field: data.force
            inspect_duration: 1h
            warn_duration: 15m
            size_trigger: 99.5
            retired_retention: 1Y
            advisory: {subject: adv.%s.%v, reliable: true, cluster: target}
            workers: 4
            order: none
            on_source_reset: recopy
            on_target_reset: stop
            on_poison: stop
            batch_messages: 1000
            batch_bytes: 16MiB
        """
    )
    entry = settings.streams[0]
    assert (settings.replicator, settings.home, settings.loglevel) == ("US-EAST", Path("/var/lib/sr"), "debug")
    assert settings.published_mode == 0o640
    assert (settings.logfile, settings.run_budget_ns, settings.linger_ns) == (
        Path("/var/log/sr.log"),
        600 * SECOND_NS,
        5 * SECOND_NS,
    )
    assert settings.spark.mode == "classic"
    assert settings.spark.config == {"spark.driver.memory": "2g", "spark.ui.enabled": "false", "spark.cores.max": "4"}
    assert (settings.sensor.interval_ns, settings.sensor.lag_messages) == (10 * SECOND_NS, 100)
    assert (settings.sensor.lag_ns, settings.snapshots.retention_ns) == (3 * SECOND_NS // 2, 30 * DAY_NS)
    assert settings.gaps.retention_ns == 7 * DAY_NS
    assert (entry.replicator, entry.name, entry.label) == ("US-EAST", "city.one", "city.one/REG")
    assert entry.asset_prefix == ["city_one", "REG"]
    assert (entry.target_stream, entry.prefix, entry.remove) == ("FLEET", "fleet", "in.")
    assert entry.target_pattern("in.reg.web1") == "fleet.reg.web1"
    assert (entry.filter_subject, entry.create_target, entry.ephemeral) == ("in.reg.>", False, False)
    assert (entry.max_age_ns, entry.retired_retention_ns) == (2 * HOUR_NS, 365 * DAY_NS)
    assert entry.extractor == JsonField("a\\.b.0")
    assert entry.force_path == ("data", "force")
    assert entry.policy == Policy(HOUR_NS, HOUR_NS // 4, 100)
    assert entry.advisory is not None
    assert (entry.advisory.subject, entry.advisory.reliable, entry.advisory.cluster) == ("adv.%s.%v", True, "target")
    assert (entry.workers, entry.order, entry.batch_messages, entry.batch_bytes) == (4, "none", 1000, 16 << 20)
    assert (entry.on_source_reset, entry.on_target_reset, entry.on_poison) == ("recopy", "stop", "stop")


@pytest.mark.parametrize(
    ("top", "keys", "expected"),
    (
        ("", "", 500_000),
        ("", ", batch_messages: 1000", 1_000),
        ("", ", batch_messages: 1000, catch_up_messages: 5000", 5_000),
        ("", ", catch_up_messages: 10", 50_000),
        ("catch_up_messages: 400000\n", ", batch_messages: 1000", 400_000),
        ("catch_up_messages: 400000\n", ", catch_up_messages: 450000", 450_000),
    ),
)
def test_catch_up_batch_is_bounded_by_the_configured_sizes(load: Load, top: str, keys: str, expected: int) -> None:
    assert load(TOP + top + STREAM % keys).streams[0].catch_up_messages == expected


def test_example_configuration_is_valid() -> None:
    settings = load_settings(Path(__file__).parent.parent / "conf" / "replication.yaml", {})
    assert settings.streams[0].tracked
    assert settings.warnings == ()


@pytest.mark.parametrize(
    ("keys", "extractor"),
    (
        ("inspect_header: Node", HeaderName("Node")),
        ("inspect_subject_token: 3", SubjectToken(3)),
        ("inspect_subject_token: -1", SubjectToken(-1)),
    ),
)
def test_header_and_subject_token_are_sender_extractors(
    keys: str, extractor: HeaderName | SubjectToken, stream: LoadStream
) -> None:
    entry = stream(f"{keys}, inspect_duration: 1h")
    assert entry.extractor == extractor
    assert entry.policy == Policy(HOUR_NS, HOUR_NS // 2, 0)


@pytest.mark.parametrize(
    ("keys", "start"),
    (
        ("start_sequence: 7", Start("sequence", 7)),
        ("start_delta: 1w", Start("delta", 7 * DAY_NS)),
        ("start_time: 2022-03-15T13:48:10.000000001Z", Start("time", 1_647_352_090_000_000_001)),
        ("start_at_end: true", Start("end")),
        ("start_at_end: false, start_sequence: 0, start_delta: 1s", Start("delta", SECOND_NS)),
        ("start_time: '2022-03-15T13:48:10Z', start_delta: 1h", Start("delta", HOUR_NS)),
        ("start_time: '2022-03-15T13:48:10Z', start_delta: 1h, start_sequence: 7", Start("sequence", 7)),
        ("start_delta: 1h, start_sequence: 7, start_at_end: true", Start("end")),
    ),
)
def test_first_start_option_applies(keys: str, start: Start, stream: LoadStream) -> None:
    assert stream(keys).start == start


@pytest.mark.parametrize(
    ("keys", "order"),
    (("workers: 1", "stream"), (f"workers: 4, {SAMPLED}", "sender"), ("workers: 4, order: none", "none")),
)
def test_default_order_depends_on_workers(keys: str, order: str, stream: LoadStream) -> None:
    assert stream(keys).order == order


@pytest.mark.parametrize(
    ("keys", "warning"),
    (
        ("monitor_port: 8080\n", None),
        ("profiling: true\n", "profiling"),
        ("monitor_port: 0\nprofiling: false\n", None),
    ),
)
def test_keys_without_effect_are_accepted_with_one_warning(keys: str, warning: str | None, load: Load) -> None:
    warnings = load(TOP + keys + STREAM % "").warnings
    assert [note.split()[0] for note in warnings] == ([warning] if warning else [])


@pytest.mark.parametrize(
    ("keys", "of_stream", "short"),
    (
        ("snapshots: {retention: 2d}\nadvisories: {retention: 3d}\n", "sender", ["snapshots"]),
        ("advisories: {retention: 71h}\n", "sender", ["advisories"]),
        ("snapshots: {retention: 3d}\n", "sender", []),
        ("snapshots: {retention: 1d}\n", None, []),
    ),
)
def test_history_too_short_for_the_daily_inventory_gives_a_warning(
    keys: str, of_stream: str | None, short: list[str], load: Load
) -> None:
    sampled = f", inspect_field: {of_stream}, inspect_duration: 1h" if of_stream else ""
    warnings = load(TOP + keys + STREAM % sampled).warnings
    assert list(warnings) == [f"{key}.retention: too short for inventory_daily; set it to 3d or more" for key in short]


def test_target_initiated_gives_one_warning_for_all_streams(load: Load) -> None:
    entry = "- {stream: %s, source_url: a, target_url: b, target_initiated: true}\n"
    (warning,) = load(TOP + "streams:\n" + entry % "ONE" + entry % "TWO").warnings
    assert warning.startswith("target_initiated has no effect (ONE, TWO)")


@pytest.mark.parametrize(
    ("block", "message"),
    (
        ("{facts: country}", "inventory.facts: 'country' is not a list; use [os.name, role]"),
        ("{facts: [a, a]}", "inventory.facts: names 'a' twice; remove one"),
        ("{facts: [a..b]}", "'a..b' has an empty segment"),
        ("{timezone: Mars}", "inventory.timezone: 'Mars' is not a time zone; use a name such as UTC or Europe/London"),
    ),
)
def test_invalid_inventory_block_is_refused(block: str, message: str, refusal: Refusal) -> None:
    assert message in refusal(f"{TOP}streams: [{{stream: S, source_url: a, target_url: b}}]\ninventory: {block}\n")


def test_null_and_empty_values_count_as_unset(stream: LoadStream) -> None:
    assert stream("name: '', tls: null, leader_election_name: '', filter_subject: ") == stream()


def test_merge_keys_and_anchors_share_settings_between_streams(load: Load) -> None:
    settings = load(
        "name: EAST\nstreams:\n- &base {stream: ONE, source_url: a, target_url: b, max_age: 1h}\n"
        "- {<<: *base, stream: TWO}\n"
    )
    assert [(entry.stream, entry.max_age_ns) for entry in settings.streams] == [("ONE", HOUR_NS), ("TWO", HOUR_NS)]


def test_thousand_entries_may_share_keys_through_an_alias(load: Load) -> None:
    base = "- &base {stream: S, source_url: '${CITY}', target_url: b, max_age: 1h}\n"
    others = "".join(f"- {{<<: *base, stream: S{number}}}\n" for number in range(1_000))
    settings = load(TOP + "streams:\n" + base + others, CITY="city")
    assert len(settings.streams) == 1_001
    assert {entry.source.servers for entry in settings.streams} == {("city:4222",)}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("twice", ("[*a{0}, *a{0}]", "{{x: *a{0}, y: *a{0}}}", "{{<<: [*a{0}, *a{0}]}}"))
def test_too_many_alias_values_are_refused_before_expansion(twice: str, refusal: Refusal) -> None:
    doublings = [f"k{level + 1}: &a{level + 1} {twice.format(level)}\n" for level in range(40)]
    text = "name: EAST\nk0: &a0 {x: 1}\n" + "".join(doublings) + "streams: *a40\n"
    assert refusal(text) == "its aliases (*name) repeat more than 500,000 values; use fewer of them"


@pytest.mark.timeout(10)
def test_long_text_repeated_by_aliases_is_refused(refusal: Refusal) -> None:
    text = "name: EAST\nstreams: [&a {stream: " + "x" * 1_000_000 + "}, " + "*a, " * 3_000 + "]\n"
    assert refusal(text) == "its aliases (*name) repeat more than 500,000 values; use fewer of them"


def test_sites_group_entries_by_name_in_file_order(load: Load) -> None:
    entry = "- {stream: %s, source_url: a, target_url: b, name: %s}\n"
    settings = load(TOP + "streams:\n" + entry % ("ONE", "LON") + entry % ("ONE", "PAR") + entry % ("TWO", "LON"))
    assert {site: [e.stream for e in entries] for site, entries in settings.sites.items()} == {
        "LON": ["ONE", "TWO"],
        "PAR": ["ONE"],
    }
    assert list(settings.sites) == ["LON", "PAR"]
    assert settings.sites is settings.sites, "sorted once, not at each access"
    assert [e.label for e in settings.find("ONE")] == ["LON/ONE", "PAR/ONE"]
    assert [e.label for e in settings.find("LON/TWO")] == ["LON/TWO"]
    with pytest.raises(ConfigurationError, match=r"stream 'TWOO' is not configured; did you mean 'TWO'\?"):
        settings.find("TWOO")


def test_settings_can_be_pickled(load: Load) -> None:
    settings = load(TOP + STREAM % f", {SAMPLED}")
    received = pickle.loads(pickle.dumps(settings))
    assert (received, received.sites) == (settings, settings.sites)


def test_changed_settings_compute_their_sites_anew(load: Load) -> None:
    settings = load(TOP + STREAM % "" + "feeds: [{stream: ADV, url: a, name: centre}]\n")
    changed = settings.changed(streams=())
    assert (list(settings.sites), list(changed.sites)) == (["EAST", "centre"], ["centre"])
    with pytest.raises(ConfigurationError, match="stream 'REG' is not configured"):
        changed.find("REG")


def test_streams_and_feeds_have_the_same_properties(load: Load) -> None:
    advisory = "advisory: {subject: adv, cluster: %s}"
    entry = "- {stream: %s, source_url: a, target_url: b, %s}\n"
    settings = load(
        TOP
        + "streams:\n"
        + entry % ("ALL", "ephemeral: true")
        + entry % ("ONE", f"{SAMPLED}, {advisory % 'source'}")
        + entry % ("TWO", f"{SAMPLED}, {advisory % 'target'}")
        + "feeds: [{stream: ADV, url: c}]\n"
    )
    a, b, c = (ClusterSettings((f"{host}:4222",)) for host in "abc")
    assert [
        (entry.kind, entry.tracked, entry.ephemeral, entry.clusters, entry.advisory_cluster)
        for entry in settings.entries
    ] == [
        ("stream", False, True, (a, b), None),
        ("stream", True, False, (a, b), a),
        ("stream", True, False, (a, b), b),
        ("feed", False, False, (c,), None),
    ]
    assert [(entry.policy is None, entry.advisory is None) for entry in settings.entries] == [
        (True, True),
        (False, False),
        (False, False),
        (True, True),
    ]


def test_digest_depends_only_on_effective_settings(load: Load) -> None:
    plain = load(TOP + STREAM % "")
    assert load("# a comment\n" + TOP + "logfile: /x\n" + STREAM % ", on_poison: park").digest == plain.digest
    assert load(TOP + STREAM % ", max_age: 1h").digest != plain.digest
    by_field = load(TOP + STREAM % ", inspect_field: a, inspect_duration: 1h")
    assert load(TOP + STREAM % ", inspect_header: a, inspect_duration: 1h").digest != by_field.digest


def test_environment_variables_are_replaced_in_every_type(stream: LoadStream) -> None:
    entry = stream("max_age: '${AGE}', workers: '${N}', order: none, ephemeral: '${E}'", AGE="1h", N="2", E="true")
    assert (entry.max_age_ns, entry.workers, entry.ephemeral) == (HOUR_NS, 2, True)


def test_password_may_come_from_the_environment(load: Load) -> None:
    settings = load(TOP + "streams: [{stream: A, source_url: 'nats://me:${PW}@a', target_url: b}]", PW="hunter2")
    assert settings.streams[0].source.password == "hunter2"


def test_metrics_and_health_are_on_loopback_by_default(load: Load) -> None:
    ports = "metrics: {port: 9100}\nhealth: {port: 9101}\n"
    settings = load(TOP + ports + "streams: [{stream: A, source_url: a, target_url: b}]")
    assert (settings.metrics.host, settings.health.host) == ("127.0.0.1", "127.0.0.1")


def test_unset_variable_is_named_with_stream_and_key(stream_refusal: Refusal) -> None:
    assert stream_refusal("max_age: '${AGE}'") == "max_age: environment variable AGE is not set"


def test_invalid_variable_reference_is_refused(stream_refusal: Refusal) -> None:
    assert "without a name; use ${NAME}" in stream_refusal("max_age: '${AGE:-1h}'", AGE="1h")


@pytest.mark.parametrize("text", ("'0640'", "0640", "640", "0o640", "'640'"))
def test_published_mode_is_octal_with_and_without_quotes(load: Load, text: str) -> None:
    assert load(TOP + f"published_mode: {text}\n" + STREAM % "").published_mode == 0o640
    assert load(TOP + STREAM % "").published_mode == 0o600


def test_home_is_from_environment_before_state_store(load: Load, tmp_path: Path) -> None:
    text = TOP + "state_store: /there\n" + STREAM % ""
    assert load(text, SR_ASSETS_HOME="/here").home == Path("/here")
    assert load(text, SR_ASSETS_HOME="").home == Path("/there")


def test_relative_home_is_in_the_working_directory(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(TOP + STREAM % "", SR_ASSETS_HOME="data").home == tmp_path / "data"


def test_environment_names_the_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text(TOP + STREAM % "")
    assert load_settings(environ={"SR_ASSETS_CONFIG": str(path)}).replicator == "EAST"


def test_missing_file_is_one_line_with_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.yaml: cannot be read: No such file.*SR_ASSETS_CONFIG"):
        load_settings(tmp_path / "none.yaml", {})


def test_directory_as_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: Is a directory"):
        load_settings(tmp_path, {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_unreadable_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "secret.yaml"
    path.touch(mode=0)
    with pytest.raises(ConfigurationError, match="cannot be read: Permission denied"):
        load_settings(path, {})


def test_file_without_utf8_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("name: Zürich".encode("latin-1"))
    with pytest.raises(ConfigurationError, match="is not UTF-8 text"):
        load_settings(path, {})


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("just text", "must be a mapping"),
        ("- a\n- b", "must be a mapping"),
        ("name: [EAST\nstreams: ]", "is not valid YAML in line 2"),
        ("name: EAST\n\tstreams: []", "is not valid YAML in line 2, column 1"),
        ("name: !!python/object:os.system x", "is not valid YAML in line 1"),
        ("name: \x07", "is not valid YAML"),
        ("name: 1\n---\nname: 2", "another document"),
        ("name: EAST\nname: WEST", "key 'name' appears twice"),
        ("name: EAST\nstreams: &s [*s]", "nested too deeply"),
        ("name: " + "[" * 3000, "is not valid YAML"),
        ("name: EAST", "streams: is required"),
        ("streams: []", "name: is required"),
        ("name: EAST\nstreams: []", "streams: is empty"),
        ("name: EAST\nstreams: {stream: A}", "streams: must be a list"),
        ("name: EAST\nstreams: [A]", "streams entry 1: must be a mapping"),
        ("name: EAST\nstreams: [{source_url: a, target_url: b}]", "streams entry 1: stream: is required"),
        ("name: EAST\nstreams: [{stream: A, target_url: b}]", "stream 'A': source_url: is required"),
        (
            "name: EAST\nstreams: [{stream: A, name: B, source_url: b}]",
            "stream 'A' (name 'B'): target_url: is required",
        ),
    ),
)
def test_malformed_file_is_refused(text: str, message: str, refusal: Refusal) -> None:
    assert message in refusal(text)


def test_unknown_key_is_named_with_closest_and_allowed_keys(stream_refusal: Refusal) -> None:
    line = stream_refusal("Inspect_Durations: 1h")
    assert line.startswith("unknown key 'Inspect_Durations'; did you mean 'inspect_duration'? allowed: stream, name, ")


@pytest.mark.parametrize(
    ("keys", "where"),
    (
        ("stats: 1\n", ""),
        ("1: x\n", ""),
        ("spark: {modus: classic}\n", "spark: "),
        ("sensor: {every: 1s}\n", "sensor: "),
        ("snapshots: {keep: 1d}\n", "snapshots: "),
        ("gaps: {keep: 1d}\n", "gaps: "),
    ),
)
def test_unknown_key_outside_streams_is_refused(keys: str, where: str, refusal: Refusal) -> None:
    assert refusal(TOP + keys + STREAM % "").startswith(f"{where}unknown key ")


def test_unknown_key_of_advisory_is_refused(stream_refusal: Refusal) -> None:
    assert stream_refusal(f"{SAMPLED}, advisory: {{topic: a}}").startswith("advisory: unknown key 'topic'; ")


def test_two_spellings_of_one_key_are_refused(stream_refusal: Refusal) -> None:
    assert "key 'Max_Age' appears twice" in stream_refusal("max_age: 1h, Max_Age: 2h")


@pytest.mark.parametrize(
    ("top", "entry", "member"),
    (
        ("", "", None),
        ("", ", leader_election_name: a", "a"),
        ("leader_election_name: a\n", "", "a"),
        ("leader_election_name: a\n", ", leader_election_name: b", "b"),
        ("leader_election_name: a\n", ", leader_election_name: false", None),
        ("leader_election_name: {}\n", "", None),
    ),
)
def test_entry_inherits_the_name_of_the_member(top: str, entry: str, member: str | None, load: Load) -> None:
    settings = load(TOP + top + STREAM % entry)
    assert settings.streams[0].leader_election_name == member


@pytest.mark.parametrize(
    ("block", "cluster"),
    (
        ("", "city:4222"),
        ("leader_election: {cluster: target}", "centre:4222"),
        ("leader_election: {cluster: 'nats://u:p@other'}", "other:4222"),
    ),
)
def test_keys_of_the_election_are_in_the_chosen_cluster(block: str, cluster: str, load: Load) -> None:
    settings = load(f"{TOP}{STREAM % ''}{block}\n")
    assert settings.leader_election.bucket == "CHORIA_LEADER_ELECTION"
    assert settings.election_cluster(settings.streams[0]).label == cluster


@pytest.mark.parametrize(
    ("keys", "message"),
    (
        ("leader_election_name: 5", "leader_election_name: 5 is not text; put it in quotes"),
        ("leader_election_name: ' a'", "leader_election_name: ' a' cannot be a member's name: no spaces around it"),
        (f"leader_election_name: {'a' * 201}", "at most 200 bytes"),
        ("leader_election: {bucket: a.b}", "leader_election.bucket: 'a.b' is not a bucket: use letters"),
        ("leader_election: {cluster: 'nats://u:secret@a b'}", "leader_election.cluster: a server must be host"),
        ("leader_election: {ttl: 5s}", "leader_election: unknown key 'ttl'; "),
    ),
)
def test_invalid_election_is_refused(keys: str, message: str, refusal: Refusal) -> None:
    line = refusal(f"{TOP}{STREAM % ''}{keys}\n")
    assert message in line
    assert "secret" not in line


@pytest.mark.parametrize(
    ("keys", "message"),
    (
        ("max_age: 5 parsecs", "max_age: '5 parsecs' is not a duration"),
        ("max_age: 3600", "max_age: 3600 is not a duration"),
        ("max_age: -1h", "max_age: '-1h' is not a duration"),
        ("max_age: 0s", "max_age: '0s' must be longer than zero"),
        ("inspect_field: a, inspect_duration: 0h", "inspect_duration: '0h' must be longer than zero"),
        (f"{SAMPLED}, warn_duration: 0s", "warn_duration: '0s' must be longer than zero"),
        (f"{SAMPLED}, warn_duration: -5m", "warn_duration: '-5m' is not a duration"),
        ("start_sequence: -1", "start_sequence: -1 is not a whole number, 0 or more"),
        ("start_sequence: 1.5", "start_sequence: 1.5 is not a whole number"),
        ("start_time: yesterday", "start_time: 'yesterday' is not a time"),
        ("start_time: 2022-03-15", "start_time: '2022-03-15' is not a time"),
        ("start_time: 2022-13-15T00:00:00Z", "is not a time"),
        ("start_at_end: maybe", "start_at_end: 'maybe' is neither true nor false"),
        ("workers: 0", "workers: 0 is not a whole number, 1 or more"),
        ("workers: true", "workers: True is not a whole number"),
        ("workers: 2, order: random", "order: 'random' is not one of stream, sender, none"),
        ("on_source_reset: explode", "on_source_reset: 'explode' is not one of stop, recopy, skip_to_now"),
        ("on_target_reset: explode", "on_target_reset: 'explode' is not one of continue, recopy, stop"),
        ("on_poison: explode", "on_poison: 'explode' is not one of park, stop"),
        ("batch_messages: 0", "batch_messages: 0 is not a whole number"),
        ("catch_up_messages: 500001", "catch_up_messages: 500001 is not a whole number, 1 to 500000"),
        ("catch_up_messages: 0", "catch_up_messages: 0 is not a whole number"),
        ("batch_bytes: 0", "batch_bytes: 0 must be 1 byte or more"),
        ("batch_bytes: 1 lot", "batch_bytes: '1 lot' is not a size"),
        (f"{SAMPLED}, size_trigger: -1", "size_trigger: -1 is not a size"),
        ("filter_subject: a..b", "filter_subject: 'a..b' is not a subject filter"),
        ("filter_subject: 'a.>.b'", "filter_subject: 'a.>.b' is not a subject filter"),
        ("filter_subject: a b", "filter_subject: 'a b' is not a subject filter"),
        ("filter_subject: .a", "filter_subject: '.a' is not a subject filter"),
        ('filter_subject: "a\\r\\nPUB x"', "filter_subject: 'a\\r\\nPUB x' has control characters"),
        ("target_stream: a.b", "target_stream: 'a.b' is not a stream name"),
        ("target_stream: ../x", "target_stream: '../x' is not a stream name"),
        ("target_stream: 7", "target_stream: 7 is not text; put it in quotes"),
        ("target_subject_prefix: a.*", "target_subject_prefix: 'a.*' is not the beginning of a subject"),
        ("target_subject_prefix: .a", "target_subject_prefix: '.a' is not the beginning of a subject"),
        ("target_subject_remove: 'a.>'", "target_subject_remove: 'a.>' cannot occur in a subject"),
        ("inspect_field: a..b, inspect_duration: 1h", "inspect_field: 'a..b' has an empty segment"),
        ("inspect_field: .a, inspect_duration: 1h", "inspect_field: '.a' has an empty segment"),
        (f"{SAMPLED}, inspect_force_field: a.", "inspect_force_field: 'a.' has an empty segment"),
        ("inspect_header: 'a: b', inspect_duration: 1h", "inspect_header: 'a: b' is not a header name"),
        ("inspect_subject_token: -2, inspect_duration: 1h", "inspect_subject_token: -2 is not a token"),
        (f"{SAMPLED}, advisory: {{reliable: true}}", "advisory.subject: is required"),
        (
            f"{SAMPLED}, advisory: {{subject: a, cluster: moon}}",
            "advisory.cluster: 'moon' is not one of source, target",
        ),
        (f"{SAMPLED}, advisory: {{subject: a.%d}}", "advisory.subject: 'a.%d': only %s (the event) and %v"),
        (f"{SAMPLED}, advisory: {{subject: a..%s}}", "advisory.subject: 'a..%s' is not a subject"),
        (f"{SAMPLED}, advisory: {{subject: 'a.>'}}", "advisory.subject: 'a.>' is not a subject"),
        (f"{SAMPLED}, advisory: adv", "advisory: must be a mapping"),
        ("tls: /ca.pem", "tls: must be a mapping"),
        (
            "source_tls: {ca_file: /ca.pem}",
            "source_tls: unknown key 'ca_file'; allowed: ca, cert, key",
        ),
        ("target_tls: {cert: /c}", "target_tls: cert and key belong together"),
        ("tls: {ca: /a, key: /k}", "tls: cert and key belong together"),
        ("tls: {ca: 7}", "tls.ca: 7 is not text"),
    ),
)
def test_invalid_value_is_named_with_key_and_allowed_values(keys: str, message: str, stream_refusal: Refusal) -> None:
    assert message in stream_refusal(keys)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("text", ("a" * 200_000, "a:" * 100_000, f"{'a:b' * 70_000}@city"))
def test_long_value_is_refused_quickly_and_shortened(text: str, stream_refusal: Refusal) -> None:
    assert len(stream_refusal(f"workers: '{text}'")) < 150


@pytest.mark.parametrize(
    ("keys", "message"),
    (
        ("loglevel: loud\n", "loglevel: 'loud' is not one of debug, info, warn, error"),
        ("run_budget: 0s\n", "run_budget: '0s' must be longer than zero"),
        ("linger: -1s\n", "linger: '-1s' is not a duration"),
        ("sensor: {interval: 10ms}\n", "sensor: interval: must be at least 1s"),
        ("sensor: {lag_messages: 0}\n", "sensor.lag_messages: 0 is not a whole number, 1 or more"),
        ("sensor: {lag_seconds: -1}\n", "sensor.lag_seconds: -1 is not"),
        ("spark: {mode: cloud}\n", "spark.mode: must be connect-local, classic, sc://"),
        ("spark: {config: [a]}\n", "spark.config: must be a mapping"),
        ("spark: {config: {a: [b]}}\n", "spark.config: 'a' must be text with one value"),
        ("snapshots: {retention: soon}\n", "snapshots.retention: 'soon' is not a duration"),
        ("gaps: {retention: 0d}\n", "gaps.retention: '0d' must be longer than zero"),
        ("logfile: [a]\n", "logfile: ['a'] is not text"),
        ("notify: [{command: a, name: x}, {command: b, name: x}]\n", "notify.name: 'x' appears twice"),
        ("notify: [{command: a}, {command: b, name: '1'}]\n", "notify.name: '1' appears twice"),
        ("notify: [{command: a, events: bad}]\n", "notify.0.events.0: 'bad' is not one of new, timeout"),
        ("published_mode: '0666'\n", "published_mode: '0666' is not one of '0600' (owner), '0640' (owner and group)"),
        ("published_mode: true\n", "published_mode: True is not one of '0600'"),
        ("availability: {timezone: London}\n", "availability.timezone: 'London' is not a time zone"),
        ("heartbeats: {url: city, subjects: []}\n", "heartbeats.subjects: is empty"),
        ("topology: {clusters: text}\n", "topology: clusters: must be a mapping"),
    ),
)
def test_invalid_value_outside_streams_is_named_with_key(keys: str, message: str, refusal: Refusal) -> None:
    assert message in refusal(TOP + keys + STREAM % "")


@pytest.mark.parametrize(
    "keys",
    (
        "notify: [{email: {host: h, sender: a@b, to: c@d, password: 73577357}}]\n",
        "heartbeats: {url: city, subjects: [{subject: a.b}], headers: {Authorization: 73577357}}\n",
    ),
)
def test_secret_that_is_a_number_is_refused_without_showing_it(keys: str, refusal: Refusal) -> None:
    line = refusal(TOP + keys + STREAM % "")
    assert "is not text; put it in quotes" in line
    assert "7357" not in line


@pytest.mark.parametrize("name", ("a/b", "..", ".hidden", "a b", "a\\b", "a*", "a>b", "x" * 201))
def test_site_name_that_is_no_safe_folder_is_refused(name: str, refusal: Refusal) -> None:
    assert "cannot be a name" in refusal(yaml.safe_dump({"name": name}) + STREAM % "")


@pytest.mark.parametrize("name", ("a.b", "a b", "a*", ">", "a/b", "a\\b", "x" * 256))
def test_invalid_stream_name_is_refused(name: str, refusal: Refusal) -> None:
    document = {"name": "EAST", "streams": [{"stream": name, "source_url": "a", "target_url": "b"}]}
    assert "is not a stream name" in refusal(yaml.safe_dump(document))


def test_yaml_flag_as_name_is_refused_with_remedy(refusal: Refusal) -> None:
    assert refusal("name: NO\n" + STREAM % "") == "name: False is not text; put it in quotes"


def test_error_names_first_mistake_and_counts_the_others(stream_refusal: Refusal) -> None:
    assert stream_refusal("max_age: x, workers: 0, batch_bytes: x").endswith("(and 2 more)")


@pytest.mark.parametrize(
    ("keys", "message"),
    (
        (
            "inspect_field: a, inspect_header: B, inspect_duration: 1h",
            "inspect_field and inspect_header exclude each other",
        ),
        (
            "inspect_header: B, inspect_subject_token: 1, inspect_duration: 1h",
            "inspect_header and inspect_subject_token exclude",
        ),
        ("inspect_field: a", "inspect_field: needs inspect_duration"),
        ("inspect_header: a", "inspect_header: needs inspect_duration"),
        ("inspect_subject_token: 1", "inspect_subject_token: needs inspect_duration"),
        ("inspect_duration: 1h", "inspect_duration: needs one of inspect_field, inspect_header or"),
        ("inspect_subject_token: 0, inspect_duration: 1h", "inspect_duration: needs one of"),
        ("warn_duration: 1h", "warn_duration: needs sampling"),
        (f"{SAMPLED}, warn_duration: 1h", "warn_duration: 3600s must be shorter than inspect_duration (3600s)"),
        (f"{SAMPLED}, warn_duration: 61m", "warn_duration: 3660s must be shorter than inspect_duration"),
        ("inspect_force_field: a", "inspect_force_field: needs sampling"),
        ("size_trigger: 100", "size_trigger: needs sampling"),
        ("advisory: {subject: a}", "advisory: needs sampling"),
        ("retired_retention: 1M", "retired_retention: needs sampling"),
        (f"target_initiated: true, {SAMPLED}", "target_initiated: cannot be used with sampling"),
        ("target_initiated: true, max_age: 1h", "target_initiated: cannot be used with max_age"),
        (f"ephemeral: true, {SAMPLED}", "ephemeral: cannot be used with inspect_field; remove one of them"),
        ("workers: 2", "order: 'sender' (the default when workers > 1) needs one of inspect_field"),
        ("workers: 2, order: sender", "order: 'sender'"),
        ("workers: 2, order: stream", "order: 'stream' needs workers: 1"),
        ("create_target: true, no_target_create: true", "create_target: contradicts no_target_create"),
        ("create_target: false, no_target_create: false", "create_target: contradicts no_target_create"),
    ),
)
def test_contradictory_keys_are_refused(keys: str, message: str, stream_refusal: Refusal) -> None:
    assert stream_refusal(keys).startswith(message)


@pytest.mark.parametrize(
    ("keys", "result"),
    (
        ("filter_subject: reg.>, target_subject_remove: reg", "'.>'"),
        ("filter_subject: a.reg, target_subject_remove: reg", "'a.'"),
        ("filter_subject: reg, target_subject_remove: reg", "''"),
        ("target_subject_prefix: reg, target_subject_remove: reg", "'.>'"),
    ),
)
def test_subject_remove_that_leaves_an_edge_dot_is_refused(keys: str, result: str, stream_refusal: Refusal) -> None:
    line = stream_refusal(keys)
    assert line.startswith("target_subject_remove: 'reg' makes ")
    assert f"into {result}:" in line


@pytest.mark.parametrize(
    ("keys", "target"),
    (
        ("target_subject_remove: reg.", "web1"),
        ("target_subject_prefix: fleet., target_subject_remove: reg", "fleet.web1"),
        ("target_subject_prefix: reg2, target_subject_remove: '2'", "reg.reg.web1"),
    ),
)
def test_subject_rewriting_with_valid_result_is_accepted(keys: str, target: str, stream: LoadStream) -> None:
    assert stream(keys).target_pattern("reg.web1") == target


def test_subject_remove_is_checked_per_subject_without_filter(stream: LoadStream) -> None:
    entry = stream("target_subject_remove: reg")
    assert entry.target_pattern("in.reg.>") == "in.>"
    with pytest.raises(ConfigurationError, match=r"stream 'REG' \(name 'EAST'\): target_subject_remove: 'reg' makes"):
        entry.target_pattern("reg.>")


@pytest.mark.parametrize(
    ("source", "target", "keys", "message"),
    (
        ("a", "a", "", "'REG' would be copied into itself"),
        ("a:4222", "nats://A", "", "'REG' would be copied into itself"),
        ("a,b,c", "c,d", "", "'REG' would be copied into itself"),
        ("localhost", "127.0.0.1", "", "'REG' would be copied into itself"),
        ("u:p@a", "u:p@a", "target_subject_prefix: x", "'REG' would be copied into itself"),
        ("a?nkey=/x", "tls://a?nkey=/x", "", "'REG' would be copied into itself"),
        ("a", "a", "source_tls: {ca: /x}", "'REG' would be copied into itself"),
        ("a", "a", "target_stream: B", "the subjects of both streams overlap ('>')"),
        ("a", "a", "target_stream: B, filter_subject: x.>", "the subjects of both streams overlap ('x.>')"),
        ("a", "a", "target_stream: B, filter_subject: '*.x', target_subject_remove: .y", "overlap ('*.x')"),
        ("a", "a", "target_stream: B, filter_subject: 'x.>', target_subject_prefix: x", "overlap ('x.x.>')"),
    ),
)
def test_copy_into_itself_or_overlapping_subjects_is_refused(
    source: str, target: str, keys: str, message: str, refusal: Refusal
) -> None:
    entry = f"{{stream: REG, source_url: '{source}', target_url: '{target}'{keys and ', ' + keys}}}"
    line = refusal(f"name: EAST\nstreams: [{entry}]")
    assert line.startswith("stream 'REG': target_url: is the cluster of source_url")
    assert message in line


@pytest.mark.parametrize(
    ("source", "target", "keys"),
    (
        ("a:1", "a:2", ""),
        ("u:p@a", "v:q@a", ""),
        ("a?credentials=/x", "a?credentials=/y", ""),
        ("a?nkey=/x", "a", ""),
        ("a", "a", "source_tls: {cert: /x, key: /k}, target_tls: {cert: /y, key: /k}"),
        ("a", "a", "target_stream: B, target_subject_prefix: x"),
        ("a", "a", "target_stream: B, target_subject_prefix: x, filter_subject: '>'"),
        ("a", "a", "target_stream: B, target_subject_prefix: x, filter_subject: y.>"),
    ),
)
def test_copy_within_one_cluster_to_other_subjects_is_accepted(source: str, target: str, keys: str, load: Load) -> None:
    entry = f"{{stream: REG, source_url: '{source}', target_url: '{target}'{keys and ', ' + keys}}}"
    assert len(load(f"name: EAST\nstreams: [{entry}]").streams) == 1


@pytest.mark.parametrize(
    ("filter_subject", "template"),
    (("reg.>", "reg.advisory"), ("reg.>", "reg.%s.%v"), ("*.x", "%s.x"), ("reg.a.b", "reg.%v"), ("a.b", "%v")),
)
def test_advisory_subject_inside_the_tracked_stream_is_refused(
    filter_subject: str, template: str, stream_refusal: Refusal
) -> None:
    line = stream_refusal(f"filter_subject: '{filter_subject}', {SAMPLED}, advisory: {{subject: '{template}'}}")
    assert line.startswith(f"advisory.subject: '{template}' belongs to the tracked source stream itself")


@pytest.mark.parametrize(
    ("filter_subject", "advisory"),
    (
        ("reg.>", "subject: adv.%s.%v"),
        ("reg.a", "subject: reg.%s.%v"),
        ("reg.>", "subject: reg.%s, cluster: target"),
        (">", "subject: adv.%s"),
    ),
)
def test_advisory_subject_outside_the_tracked_stream_is_accepted(
    filter_subject: str, advisory: str, stream: LoadStream
) -> None:
    assert stream(f"filter_subject: '{filter_subject}', {SAMPLED}, advisory: {{{advisory}}}").advisory is not None


@pytest.mark.parametrize(
    ("first", "second", "message"),
    (
        (("A", "EAST"), ("A", None), "stream 'A' (name 'EAST'): appears twice"),
        (("A-B", None), ("A_B", None), "name 'EAST': stream: 'A-B' and 'A_B' get the same asset keys"),
        (("A", "a-b"), ("A", "a.b"), "name: 'a-b' and 'a.b' get the same asset group, job and sensor"),
        (("A", "east"), ("B", None), "name: 'east' and 'EAST' share a folder"),
        (("A", "Stra\u00dfe"), ("B", "STRASSE"), "share a folder"),
    ),
)
def test_entries_with_equal_folders_or_asset_keys_are_refused(
    first: tuple[str, str | None], second: tuple[str, str | None], message: str, refusal: Refusal
) -> None:
    entries = [
        {"stream": stream, "source_url": "a", "target_url": "b"} | ({"name": name} if name else {})
        for stream, name in (first, second)
    ]
    assert message in refusal(yaml.safe_dump({"name": "EAST", "streams": entries}))


def test_feed_needs_no_stream_and_has_the_documented_defaults(load: Load) -> None:
    settings = load(TOP + "feeds: [{stream: ADVISORIES, url: 'nats://me:hunter2@centre'}]")
    (feed,) = settings.feeds
    assert (feed.label, feed.filter_subject) == ("EAST/ADVISORIES", None)
    assert feed.source == ClusterSettings(("centre:4222",), "me", "hunter2", None)
    assert (feed.batch_messages, feed.on_source_reset, feed.start) == (200_000, "stop", Start("all"))
    assert feed.retired_retention_ns == 365 * DAY_NS
    assert (settings.streams, settings.entries, settings.sites) == ((), (feed,), {"EAST": (feed,)})
    assert settings.advisories.retention_ns == 90 * 24 * HOUR_NS
    assert settings.find("EAST/ADVISORIES") == (feed,)
    assert "hunter2" not in repr(settings)


def test_every_key_of_a_feed_sets_its_field(load: Load) -> None:
    feed = "Name: centre, stream: ADV, url: 'a,b', filter_subject: adv.>, start_delta: 1h, on_source_reset: recopy"
    feed += ", batch_messages: 7, batch_bytes: 1KiB, retired_retention: 2w"
    settings = load(TOP + "advisories: {retention: 7d}\nfeeds: [{" + feed + "}]\n" + STREAM % "")
    (loaded,) = settings.feeds
    assert (loaded.label, loaded.filter_subject) == ("centre/ADV", "adv.>")
    assert loaded.source == ClusterSettings(("a:4222", "b:4222"))
    assert (loaded.start, loaded.on_source_reset) == (Start("delta", HOUR_NS), "recopy")
    assert (loaded.batch_messages, loaded.batch_bytes, loaded.retired_retention_ns) == (7, 1024, 14 * DAY_NS)
    assert settings.advisories.retention_ns == 7 * 24 * HOUR_NS
    assert list(settings.sites) == ["EAST", "centre"]


@pytest.mark.parametrize(
    ("keys", "message"),
    (
        ("feeds: [{url: a}]", "feeds entry 1: stream: is required"),
        ("feeds: [{stream: A}]", "feed 'A': url: is required"),
        ("feeds: [{stream: A, name: x, url: 'nats://me:hunter2@'}]", "feed 'A' (name 'x'): url: a server must be host"),
        (
            "feeds: [{stream: A, url: a, target_url: b}]",
            "feed 'A': unknown key 'target_url'; allowed: stream, name, filter_subject",
        ),
        ("feeds: [{stream: A, url: a, filter_subject: 'a..b'}]", "feed 'A': filter_subject: "),
        ("feeds: {stream: A}", "feeds: must be a list"),
        ("feeds: [{stream: A, url: a}, {stream: A, url: b}]", "stream 'A' (name 'EAST'): appears twice"),
        ("feeds: [{stream: REG, url: a}]", "stream 'REG' (name 'EAST'): appears twice"),
        ("feeds: [{stream: A_B, url: a}, {stream: A-B, url: b}]", "get the same asset keys"),
        ("advisories: {retention: 0s}", "advisories.retention: "),
        ("advisories: {keep: 1d}", "advisories: unknown key 'keep'"),
        ("feeds: [{stream: A, url: a, retired_retention: 0s}]", "feed 'A': retired_retention: '0s' must be longer"),
    ),
)
def test_invalid_feed_is_refused(keys: str, message: str, refusal: Refusal) -> None:
    line = refusal(f"{TOP}{keys}\n" + STREAM % "")
    assert message in line
    assert "hunter2" not in line


def test_observer_subject_differs_from_advisory_subjects(load: Load) -> None:
    def subject(advisory: str, name: str = "london.city") -> str:
        keys = f", {SAMPLED}, name: '{name}', advisory: {{subject: adv.%s.%v{advisory}}}"
        (entry,) = load(TOP + STREAM % keys).streams
        assert entry.advisory is not None
        return entry.advisory.observer_subject

    assert subject("") == "sr_assets.observer_alive.EAST.london.city.REG"
    assert subject("", "Z\u00fcrich") == "sr_assets.observer_alive.EAST.Z%C3%BCrich.REG"
    assert subject(", observer_subject: watch.us") == "watch.us"
    assert subject(", observer_subject: watch.%s.%v") == "watch.observer_alive.london.city"


@pytest.mark.parametrize(
    ("first", "second"), ((("A", "x"), ("A", "y")), (("A", "x"), ("B", "x")), (("A", "x"), ("a", "x")))
)
def test_entries_with_distinct_folders_and_keys_are_accepted(
    first: tuple[str, str | None], second: tuple[str, str | None], load: Load
) -> None:
    entries = [
        {"stream": stream, "name": name, "source_url": "a", "target_url": "b"} for stream, name in (first, second)
    ]
    assert len(load(yaml.safe_dump({"name": "EAST", "streams": entries})).streams) == 2


@pytest.mark.parametrize(
    "block",
    (
        "heartbeats: {url: a, subjects: [{subject: h}]}",
        "topology: {clusters: {c: {url: a}}}",
        "feeds: [{stream: A, url: a}]",
    ),
)
def test_file_without_streams_loads_with_another_block(load: Load, block: str) -> None:
    assert load(TOP + block).streams == ()


def test_time_of_day_is_read_without_quotes(load: Load) -> None:
    settings = load(TOP + STREAM % "" + "notify: [{command: c, quiet_hours: {from: 22:30, to: 07:00:05}}]\n")
    (hours,) = settings.notify[0].quiet_hours
    assert (hours.begin.isoformat(), hours.end.isoformat()) == ("22:30:00", "07:00:05")
