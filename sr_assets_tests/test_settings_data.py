"""References to data sources in the configuration: resolution, defaults, mistakes, last known values and dynamic values."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sr_assets.adapters.data import current_settings, keep_values, open_source
from sr_assets.adapters.data.memory import MemorySource
from sr_assets.domain.errors import ConfigurationError, RunError, SrAssetsError
from sr_assets.operate.static_values import warn_of_changes
from sr_assets.settings import Settings, SourceSettings, load_settings
from sr_assets.settings.loading import VALUES_VARIABLE, hand_down, load_sources, reread_static

ENTRY = {"stream": "S", "source_url": "a:1", "target_url": "b:1"}
NOBODY = {"type": "kv", "url": "nats://user:secret-word@127.0.0.1:1", "bucket": "OPS"}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.fixture
def values(tmp_path: Path) -> Path:
    """The file of the source `rules`."""
    return tmp_path / "rules.yaml"


def load(home: Path, data: dict[str, Any], entry: dict[str, Any] | None = None, **top: Any) -> Settings:
    file = home.parent / "replication.yaml"
    document = {"name": "L", "state_store": str(home), "streams": [{**ENTRY, **(entry or {})}], "data": data, **top}
    file.write_text(yaml.safe_dump(document))
    return load_settings(file, top.pop("environ", {}))


def mistake(home: Path, data: dict[str, Any], entry: dict[str, Any] | None = None, **top: Any) -> str:
    """Return the error of a configuration, which must be one line."""
    with pytest.raises(SrAssetsError) as caught:
        load(home, data, entry, **top)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def memory(**values: Any) -> dict[str, Any]:
    return {"ops": {"type": "memory", "values": values}}


def rules(values: Path, **content: Any) -> dict[str, Any]:
    values.write_text(yaml.safe_dump(content))
    return {"rules": {"type": "file", "path": str(values)}}


@pytest.mark.parametrize(
    ("value", "key", "read"),
    (
        ("5s", "interval_ns", 5_000_000_000),
        ("7", "lag_messages", 7),
        (8, "lag_messages", 8),
    ),
)
def test_text_and_numbers_are_read_as_in_the_file(home: Path, value: object, key: str, read: int) -> None:
    name = key.removesuffix("_ns")
    settings = load(home, memory(x=value), sensor={name: {"data": "ops/x"}})
    assert getattr(settings.sensor, key) == read


def test_json_text_of_the_environment_is_a_list(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_FACTS", '["role", "country"]')
    data = {"host": {"type": "environment", "prefix": "SITE_"}}
    assert load(home, data, inventory={"facts": {"data": "host/FACTS"}}).inventory.facts == ("role", "country")


def test_file_is_read_by_dotted_keys(home: Path, values: Path) -> None:
    data = rules(values, orders={"interval": "2h"})
    entry = {"inspect_field": "x", "inspect_duration": {"data": "rules/orders.interval"}}
    (stream,) = load(home, data, entry).streams
    assert stream.inspect_duration_ns == 7_200 * 10**9


def test_value_may_be_a_reference(home: Path, values: Path) -> None:
    data = {**memory(a={"data": "rules/b"}), **rules(values, b="9s")}
    assert load(home, data, sensor={"interval": {"data": "ops/a"}}).sensor.interval_ns == 9 * 10**9


def test_key_of_a_source_may_be_a_reference(home: Path, values: Path) -> None:
    data = {**rules(values, b="9s"), **memory(path=str(values))}
    data["rules"]["path"] = {"data": "ops/path"}
    assert load(home, data, sensor={"interval": {"data": "rules/b"}}).sensor.interval_ns == 9 * 10**9


def test_missing_key_counts_as_the_default_with_a_warning(home: Path) -> None:
    settings = load(home, memory(), sensor={"interval": {"data": "ops/cadence", "default": "3s"}})
    assert settings.sensor.interval_ns == 3 * 10**9
    assert settings.warnings == ("data ops/cadence: memory has no key 'cadence'; put it; using the default '3s'",)


@pytest.mark.parametrize(
    ("data", "reference", "text"),
    (
        (memory(), "ops/x", "sensor.interval: data ops/x: memory has no key 'x'; put it, or set default"),
        (memory(), "opps/x", "sensor.interval: source 'opps' is not configured; did you mean 'ops'? add it to data"),
        (memory(), "x", "sensor.interval: data 'x': is not a reference; use SOURCE/KEY"),
        (memory(x="fast"), "ops/x", "sensor.interval: data ops/x: 'fast' is not a duration"),
        (memory(x="1ms"), "ops/x", "sensor: data ops/x: interval: must be at least 1s; change '1ms' in memory"),
        (memory(x=[1]), "ops/x", "sensor.interval: data ops/x: [1] is not a duration"),
        (memory(x={"data": "ops/y"}, y={"data": "ops/x"}), "ops/x", "refers to itself (ops/x -> ops/y -> ops/x)"),
        ({"f": {"type": "file", "path": "/nowhere.yaml"}}, "f/x", "data f/x: /nowhere.yaml does not exist; create it"),
        ({"ops": NOBODY}, "ops/x", "data ops/x: bucket OPS on 127.0.0.1:1 is unavailable"),
        ({"ops": {"type": "kv", "bucket": "B"}}, "ops/x", "data.ops: type kv needs url"),
        ({"ops": {"type": "memory", "bucket": "B"}}, "ops/x", "data.ops: bucket: is not a key of type memory"),
        ({"ops": {"type": "redis"}}, "ops/x", "data.ops.type: 'redis' is not one of kv, file"),
        ({"ops": {"type": "consul", "url": "nats://h"}}, "ops/x", "data.ops: url: is not a Consul URL"),
        ({**memory(), "OPS": {"type": "memory"}}, "ops/x", "has the name of source"),
        ({"my ops": {"type": "memory"}}, "ops/x", "data: 'my ops' is not a name of a source"),
        (memory(x="[" * 50_000), "ops/x", "sensor.interval: data ops/x: '[[["),
        (
            memory(**{f"a{n}": {"data": f"ops/a{n + 1}"} for n in range(1000)}),
            "ops/a0",
            "data ops/a21: more than 20 references lead to it; replace one of them by a value",
        ),
        (
            {"ops": {**NOBODY, "url": "127.0.0.1:2"}},
            "ops/a..b",
            "sensor.interval: data ops/a..b: is not a key of a bucket; use letters",
        ),
    ),
)
def test_mistake_is_one_line_with_its_remedy(home: Path, data: dict[str, Any], reference: str, text: str) -> None:
    line = mistake(home, data, sensor={"interval": {"data": reference}})
    assert text in line
    assert "secret-word" not in line


def test_two_sources_of_one_name_are_refused(home: Path) -> None:
    file = home.parent / "replication.yaml"
    file.write_text("name: L\ndata:\n  ops: {type: memory}\n  ops: {type: memory}\nstreams: []\n")
    with pytest.raises(ConfigurationError, match="key 'ops' appears twice; rename or remove one"):
        load_settings(file, {})


@pytest.mark.parametrize(
    ("more", "text"),
    (
        (
            {"defualt": "1s"},
            "sensor.interval: data ops/x: 'defualt' is not a key of a reference; did you mean 'default'?",
        ),
        ({"dynamic": "maybe"}, "sensor.interval: data ops/x: dynamic: 'maybe' is neither true nor false"),
    ),
)
def test_malformed_reference_names_its_source_and_key(home: Path, more: dict[str, Any], text: str) -> None:
    assert text in mistake(home, memory(x="5s"), sensor={"interval": {"data": "ops/x", **more}})


def test_deep_text_of_the_environment_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_DEEP", "[" * 50_000)
    data = {"host": {"type": "environment", "prefix": "SITE_"}}
    line = mistake(home, data, sensor={"interval": {"data": "host/DEEP"}})
    assert "sensor.interval: data host/DEEP: '[[[" in line
    assert len(line) < 500


@pytest.mark.parametrize("text", ("", "# nothing yet\n"))
def test_empty_file_has_no_key(home: Path, values: Path, text: str) -> None:
    values.write_text(text)
    data = {"rules": {"type": "file", "path": str(values)}}
    assert "has no key 'x'; add it to the file" in mistake(home, data, sensor={"interval": {"data": "rules/x"}})
    assert load(home, data, sensor={"interval": {"data": "rules/x", "default": "3s"}}).sensor.interval_ns == 3 * 10**9


def test_circle_of_sources_is_refused(home: Path) -> None:
    data = {"a": {**NOBODY, "url": {"data": "b/url"}}, "b": {"type": "file", "path": {"data": "a/path"}}}
    assert "refers to itself" in mistake(home, data, sensor={"interval": {"data": "a/x"}})


def test_mistake_elsewhere_in_an_entry_names_no_source(home: Path) -> None:
    entry = {"source_url": {"data": "ops/x"}, "inspect_field": "s", "inspect_duration": "1h", "warn_duration": "2h"}
    line = mistake(home, memory(x="a:1"), entry)
    assert "warn_duration: 7200s must be shorter than inspect_duration" in line
    assert "data ops/x" not in line


@pytest.mark.parametrize(
    "value",
    ("secret-word", "secret-word" * 9, ["secret-word"], {"a": ["secret-word"]}, "secret-word\n'\\", {"secret-word"}),
)
def test_bad_secret_value_is_not_shown(home: Path, value: object) -> None:
    line = mistake(home, memory(password=value), sensor={"interval": {"data": "ops/password"}})
    assert "secret-word" not in line
    assert "data ops/password: " in line


@pytest.mark.parametrize("key", ("inspect_duration", "warn_duration", "max_age", "target_stream", "filter_subject"))
def test_dynamic_value_of_a_deciding_key_is_refused(home: Path, key: str) -> None:
    line = mistake(home, memory(x="1h"), {"inspect_field": "s", key: {"data": "ops/x", "dynamic": True}})
    assert f"{key}: data ops/x: dynamic: cannot be used here: a replay must decide with the same value" in line


def test_unavailable_source_is_replaced_by_its_last_known_value(home: Path, values: Path) -> None:
    top = {"sensor": {"interval": {"data": "rules/cadence", "default": "1m"}}}
    keep_values(load(home, rules(values, cadence="5s"), **top))
    assert (home / "data.json").stat().st_mode & 0o777 == 0o600
    values.write_text("{")
    data = {"rules": {"type": "file", "path": str(values)}}
    settings = load(home, data, **top)
    assert settings.sensor.interval_ns == 5 * 10**9
    (warning,) = settings.warnings
    assert warning.startswith(f"data rules/cadence: {values}: is not valid YAML")
    assert "; using the value '5s', read " in warning
    (home / "data.json").unlink()
    with pytest.raises(RunError, match=r"data rules/cadence: .* no earlier value is known"):
        load(home, data, **top)


def test_children_use_the_static_values_of_their_parent(home: Path, values: Path) -> None:
    top = {"sensor": {"interval": {"data": "rules/cadence"}, "lag_messages": {"data": "rules/lag", "default": 4}}}
    parent = load(home, rules(values, cadence="5s"), **top)
    values.write_text("cadence: 6s")
    file = home.parent / "replication.yaml"
    handed = home / "values.json"
    handed.write_text(hand_down(parent))
    child = load_settings(file, {VALUES_VARIABLE: str(handed)})
    assert (child.sensor.interval_ns, child.sensor.lag_messages) == (5 * 10**9, 4)
    assert child.digest == parent.digest
    assert load_settings(file, {}).sensor.interval_ns == 6 * 10**9
    assert reread_static(parent) == {"rules/cadence": ("5s", "6s"), "rules/lag": (4, 4)}


def test_changed_static_value_is_announced_once_despite_an_outage(
    home: Path, values: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sr_assets.adapters.data._UNAVAILABLE_SECONDS", 0)
    settings = load(home, rules(values, cadence="5s"), sensor={"interval": {"data": "rules/cadence"}})
    seen: dict[str, object] = {}
    for content in ("cadence: 6s", "cadence: {", "cadence: 6s", "cadence: 5s", "cadence: 6s"):
        values.write_text(content)
        warn_of_changes(settings, seen)
    line = "warning: data rules/cadence: changed from '5s' to '6s' since the start; restart to use it"
    assert capsys.readouterr().err.splitlines() == [line, line]


class Putting(MemorySource):
    """A source whose values change."""

    def __init__(self, name: str, settings: SourceSettings, values: dict[str, Any]) -> None:
        super().__init__(name, settings)
        self._put = values

    def read(self, key: str) -> Any:
        """Return the present value."""
        return self._put[key]


class Bucket:
    """The values that other programs put into remote sources, in place of their connections."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: dict[str, Any] = {}
        monkeypatch.setattr("sr_assets.adapters.data.open_source", self.opened)

    def opened(self, name: str, settings: Any) -> Any:
        """Return a source with these values in place of a remote one."""
        if settings.type not in ("kv", "consul"):
            return open_source(name, settings)
        return Putting(name, SourceSettings.model_validate({"type": "memory"}), self.values)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, unique: Callable[[str], str]) -> Bucket:
    monkeypatch.setenv("SITE_PW", "S3cret")
    # Another source for each test: the reader keeps connections.
    REMOTE["url"] = f"nats://{unique('h').lower().replace('_', '-')}:1"
    return Bucket(monkeypatch)


REMOTE: dict[str, Any] = {"type": "kv", "url": "", "bucket": "OPS"}
HOST = {"host": {"type": "environment", "prefix": "SITE_"}}


def test_value_of_a_bucket_refers_to_nothing(home: Path, bucket: Bucket) -> None:
    """A writer of one key reads no other source, also where a source that is not remote leads to it."""
    data = {"ops": REMOTE, **HOST, "own": {"type": "memory", "values": {"x": {"data": "ops/x"}}}}
    bucket.values["x"] = '[{"match": "*", "cron": "0 0 * * *", "for": "1h", "reason": {"data": "host/PW"}}]'
    for label in ("ops/x", "own/x"):
        line = mistake(home, data, maintenance={"data": label})
        assert "S3cret" not in line
        assert "is not text" in line
    bucket.values["x"] = '[{"data": "host/PW"}]'
    assert "S3cret" not in mistake(home, data, inventory={"facts": {"data": "ops/x"}})
    # The chain of the file's own values stays.
    own = {"own": {"type": "memory", "values": {"x": {"data": "host/PW"}}}, **HOST}
    assert load(home, own, advisories={"retention": "1d"}, leader_election_name={"data": "own/x"}).streams[
        0
    ].leader_election_name == ("S3cret")


#: The keys that execute or locate something, each with a value that is valid elsewhere.
LOCAL: tuple[tuple[dict[str, Any], object, str], ...] = (
    ({"notify": {}}, [{"command": ["sh", "-c", "id"]}], "command"),
    ({"notify": {}}, [{"webhook": "https://evil.example/x"}], "webhook"),
    ({"notify": {}}, [{"email": {"host": "evil", "sender": "a@b", "to": "c@d"}}], "email.host"),
    ({"notify": [{"command": {}}]}, ["sh"], "command"),
    ({"notify": {}}, {"COMMAND": "id"}, "command"),
    ({"logfile": {}}, "/etc/cron.d/x", "logfile"),
    ({"state_store": {}}, "/etc", "state_store"),
    ({"metrics": {"textfile": {}}}, "/etc/x.prom", "textfile"),
    ({"metrics": {}}, {"port": 1, "host": "0.0.0.0"}, "host"),
    ({"spark": {}}, {"config": {"spark.driver.extraJavaOptions": "-agentpath:/x"}}, "spark"),
    ({"spark": {"config": {}}}, {"a": "b"}, "config"),
    ({"tls": {}}, {"ca": "/tmp/ca.pem"}, "tls"),
    ({"tls": {"ca": {}}}, "/tmp/ca.pem", "ca"),
    ({"heartbeats": {"url": {}, "subjects": []}}, "nats://evil:1", "url"),
    ({"checkpoint": {}}, {"cluster": "nats://evil:1"}, "cluster"),
    ({"checkpoint": {"key": {}}}, "x" * 20, "key"),
    ({"streams": {}}, [{**ENTRY}], "source_url"),
    ({"streams": [{**ENTRY, "source_url": {}}]}, "nats://evil:1?insecure=true&credentials=/etc/x", "source_url"),
    ({"streams": [{**ENTRY, "source_tls": {}}]}, {}, "source_tls"),
)


def referring(tree: Any, **more: Any) -> Any:
    """Return a tree with a reference in place of its empty mapping."""
    if tree == {}:
        return {"data": "ops/x", **more}
    if isinstance(tree, dict):
        return {key: referring(value, **more) for key, value in tree.items()}
    return [referring(value, **more) for value in tree] if isinstance(tree, list) and tree else tree


@pytest.mark.parametrize("source", ("kv", "consul"))
@pytest.mark.parametrize(("tree", "value", "key"), LOCAL, ids=map(str, range(len(LOCAL))))
def test_remote_source_sets_no_key_that_executes_or_locates(
    home: Path, bucket: Bucket, tree: dict[str, Any], value: object, key: str, source: str
) -> None:
    remote = REMOTE if source == "kv" else {"type": "consul", "url": REMOTE["url"].replace("nats", "http")}
    bucket.values["x"] = value if isinstance(value, str) else json.dumps(value)
    line = mistake(home, {"ops": remote}, **referring(tree))
    assert f"data ops/x: '{key}' executes or locates something" in line
    assert "set trusted: true in data.ops" in line
    assert "evil" not in line.replace("nats://evil", "")
    # A source of this host, or a trusted one, may: whatever is wrong then is another mistake.
    for data in ({"ops": {**remote, "trusted": True}}, {"ops": {"type": "memory", "values": {"x": value}}}):
        try:
            load(home, data, **referring(tree))
        except SrAssetsError as error:
            problem = str(error)
        else:
            problem = ""
        assert "executes or locates" not in problem


def test_last_known_value_of_a_bucket_fills_no_command(home: Path, bucket: Bucket) -> None:
    """The home may know a value from before this rule."""
    command = [{"command": ["id"]}]
    data = {"ops": {**REMOTE, "trusted": True}}
    bucket.values["x"] = json.dumps(command)
    keep_values(load(home, data, notify={"data": "ops/x", "dynamic": True}))
    assert "executes or locates" in mistake(home, {"ops": REMOTE}, notify={"data": "ops/x", "dynamic": True})


@pytest.mark.parametrize(
    ("tree", "value"),
    (
        ({"sensor": {"interval": {}}}, '["5s"]'),
        ({"leader_election_name": {}}, '{"a": 1}'),
        ({"checkpoint": {"bucket": {}}}, "[1]"),
    ),
)
def test_json_is_read_for_lists_and_blocks_only(
    home: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tree: dict[str, Any], value: str
) -> None:
    bucket.values["x"] = value
    monkeypatch.setenv("SITE_x", value)
    environment: dict[str, Any] = {"type": "environment", "prefix": "SITE_"}
    for source in (REMOTE, environment):
        try:
            settings = load(home, {"ops": source}, None, **referring(tree))
        except SrAssetsError as error:
            # The text as it is, not its content.
            text = str(error)
        else:
            text = f"{settings.streams[0].leader_election_name!r} is not refused"
        assert f"{value!r} is not" in text


def test_values_of_secret_keys_show_a_digest_alone(
    home: Path, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    """The key that a value fills decides, not its label."""
    data = {"ops": {**REMOTE, "trusted": True}}
    top: dict[str, Any] = {
        "notify": {"data": "ops/x", "dynamic": True},
        "sensor": {"interval": {"data": "ops/y", "dynamic": True}},
    }
    hooks = ["https://hooks.example/T0/old", "https://hooks.example/T0/new"]
    caplog.set_level("INFO")
    for hook, interval in zip(hooks, ("5s", "6s"), strict=True):
        bucket.values |= {"x": json.dumps([{"webhook": hook}]), "y": interval}
        keep_values(load(home, data, **top))
    details = dict(actions(home))
    shown = caplog.text + json.dumps(details)
    assert not [hook for hook in hooks if hook in shown]
    assert "hooks.example" not in shown
    assert details["ops/y"] == "5s -> 6s"
    before, after = details["ops/x"].split(" -> ")
    assert before != after
    assert before.startswith("*** (")


def test_bad_value_of_a_secret_block_is_not_shown(home: Path, bucket: Bucket) -> None:
    data = {"ops": {**REMOTE, "trusted": True}}
    bucket.values["x"] = json.dumps(
        [{"email": {"host": "h", "sender": "no address", "to": "a@b", "password": "S3cret"}}]
    )
    line = mistake(home, data, notify={"data": "ops/x"})
    assert "S3cret" not in line


def actions(home: Path) -> list[tuple[str, str]]:
    """Return the targets and details of the recorded actions."""
    rows = map(json.loads, (home / "actions" / "actions.jsonl").read_text().splitlines())
    return [(row["subject"], row["detail"]) for row in rows]


def dynamic(home: Path, values: Path, **content: Any) -> Settings:
    entry = {"paused": {"data": "rules/paused", "default": False, "dynamic": True}}
    return load(home, rules(values, **content), entry, run_budget={"data": "rules/budget", "dynamic": True})


def test_dynamic_value_is_read_again_and_its_change_recorded(home: Path, values: Path) -> None:
    settings = dynamic(home, values, paused=True, budget="1m")
    assert current_settings(settings).streams[0].paused
    values.write_text("budget: 2m\n")
    current = current_settings(settings)
    assert (current.streams[0].paused, current.run_budget_ns) == (False, 120 * 10**9)
    assert (settings.streams[0].paused, settings.run_budget_ns) == (True, 60 * 10**9)
    rows = [json.loads(line) for line in (home / "actions" / "actions.jsonl").read_text().splitlines()]
    changes = {(row["action"], row["subject"], row["detail"]) for row in rows}
    assert changes == {
        ("data change", "rules/paused", "true -> false"),
        ("data change", "rules/budget", "1m -> 2m"),
    }


def test_bad_dynamic_value_is_logged_once_and_the_previous_one_kept(
    home: Path, values: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = dynamic(home, values, paused=True, budget="1m")
    current_settings(settings)
    values.write_text("paused: perhaps\nbudget: 2m\n")
    for _ in range(3):
        current = current_settings(settings)
        assert (current.streams[0].paused, current.run_budget_ns) == (True, 120 * 10**9)
    lines = [line for line in caplog.messages if "perhaps" in line]
    assert len(lines) == 1
    assert "stream 'S': paused: data rules/paused: 'perhaps' is neither true nor false; put a valid value" in lines[0]
    values.write_text("paused: false\nbudget: 2m\n")
    assert not current_settings(settings).streams[0].paused


@pytest.mark.parametrize(
    ("content", "text"),
    (
        ({"paused": {"data": "rules/paused"}}, "data rules/paused: refers to itself"),
        ({"paused": {"data": "rules/gone"}}, "data rules/gone: "),
        ({"paused": {"data": "other/x"}}, "source 'other' is not configured"),
        ({"paused": {"data": "x"}}, "data 'x': is not a reference"),
    ),
)
@pytest.mark.parametrize("starts", (False, True))
def test_dynamic_value_that_is_a_bad_reference_is_replaced(
    home: Path, values: Path, caplog: pytest.LogCaptureFixture, content: dict[str, Any], text: str, starts: bool
) -> None:
    settings = current_settings(dynamic(home, values, paused=True, budget="1m"))
    if starts:  # as the process of a run does
        settings = dynamic(home, values, budget="2m", **content)
    else:
        values.write_text(yaml.safe_dump({"budget": "2m", **content}))
    for _ in range(2):
        current = current_settings(settings)
        assert (current.streams[0].paused, current.run_budget_ns) == (True, 120 * 10**9)
    lines = [line for line in caplog.messages if text in line]
    assert len(lines) == 1
    assert "; using the value 'true', read " in lines[0]


def test_deleted_dynamic_value_without_a_default_stays(home: Path, values: Path) -> None:
    settings = dynamic(home, values, paused=True, budget="1m")
    keep_values(settings)
    for current in (current_settings(settings), dynamic(home, values, paused=False)):
        values.write_text("paused: false\n")
        assert current.run_budget_ns == 60 * 10**9
    assert not current_settings(settings).streams[0].paused
    (home / "data.json").unlink()
    with pytest.raises(
        ConfigurationError, match=r"data rules/budget: .* has no key 'budget'; add it to the file, or set"
    ):
        dynamic(home, values, paused=False)


def test_dynamic_value_out_of_bounds_is_replaced_at_a_start(home: Path, values: Path) -> None:
    top: dict[str, Any] = {"sensor": {"interval": {"data": "rules/cadence", "dynamic": True}}}
    keep_values(load(home, rules(values, cadence="5s"), **top))
    settings = load(home, rules(values, cadence="1ms"), **top)
    assert settings.sensor.interval_ns == 5 * 10**9
    (warning,) = settings.warnings
    assert (
        "sensor.interval: data rules/cadence: interval: must be at least 1s; put a valid value; using '5s'" in warning
    )
    (home / "data.json").unlink()
    assert "must be at least 1s; change '1ms' in" in mistake(home, rules(values, cadence="1ms"), **top)


def test_unavailable_dynamic_value_stays(home: Path, values: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = dynamic(home, values, paused=True, budget="1m")
    keep_values(settings)
    values.write_text("{")
    assert current_settings(settings).streams[0].paused
    assert any("data rules/paused: " in line for line in caplog.messages)


def test_unchanged_dynamic_values_are_not_validated_again(home: Path, values: Path) -> None:
    settings = dynamic(home, values, paused=True, budget="1m")
    assert current_settings(settings).streams is settings.streams


def test_sources_are_read_although_a_value_is_missing(home: Path) -> None:
    assert "no key" in mistake(home, memory(), sensor={"interval": {"data": "ops/x"}})
    sources = load_sources(home.parent / "replication.yaml", {})
    assert (sources.home, list(sources.data)) == (home, ["ops"])


@pytest.mark.parametrize(
    ("lock", "text"),
    (
        ("ops/x", "locks: ops/x: source 'ops' is of type memory; use a source of type kv"),
        ("opps/x", "locks: opps/x: source 'opps' is not configured; did you mean 'ops'?"),
        ("x", "locks.0: data 'x': is not a reference"),
        ("ops/a b", "locks.0: data 'ops/a b': is not a reference"),
        ("ops/*", "locks.0: 'ops/*': is not a lock"),
    ),
)
def test_unusable_lock_is_refused(home: Path, lock: str, text: str) -> None:
    assert text in mistake(home, memory(), locks=[lock])
