"""The commands `data …` and `check --explain`."""

import json
from pathlib import Path
from typing import Any

import pytest

from sr_assets.adapters.published.actions import actions_query
from sr_assets_tests.published import publish_nodes
from sr_assets_tests.rig import Command, Rig, in_background, wait_until
from sr_assets_tests.sourced import kv, make_data_bucket


@pytest.fixture
def bucket(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bucket, and the configuration of a site whose sensor waits for a value in it."""
    bucket = make_data_bucket(rig)
    rig.add("S", target_stream="T", target_subject_prefix="copy")
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(rig.home / "replication.yaml"))
    monkeypatch.delenv("SR_ASSETS_HOME", raising=False)
    data = {"ops": kv(rig, bucket), "mem": {"type": "memory", "values": {"a": "5s"}}}
    rig.settings(data=data, sensor={"interval": {"data": "mem/a"}})
    return bucket


def actions(rig: Rig) -> list[tuple[Any, ...]]:
    publish_nodes(rig.home)
    return [tuple(row.values()) for row in rig.rows(f"SELECT action, subject, detail FROM ({actions_query(rig.home)})")]


def test_value_is_put_read_listed_and_deleted(rig: Rig, bucket: str, command: Command) -> None:
    assert command("data", "put", "ops/cadence", "1h", "--yes") == (0, "ops/cadence: 1h\n", "")
    assert command("data", "put", "ops/cadence", "2h", "--yes")[0] == 0
    assert command("data", "get", "ops/cadence") == (0, "2h\n", "")
    _, listed, _ = command("data", "list", "ops", "--format", "json")
    assert json.loads(listed) == [{"key": "ops/cadence", "value": "2h"}]
    _, history, _ = command("data", "get", "ops/cadence", "--history", "--format", "json")
    assert [(row["operation"], row["value"]) for row in json.loads(history)] == [("put", "1h"), ("put", "2h")]
    assert command("data", "delete", "ops/cadence", "--yes") == (0, "ops/cadence: deleted\n", "")
    code, _, error = command("data", "get", "ops/cadence")
    assert (code, error.count("\n")) == (1, 1)
    assert error.startswith("error: ops/cadence: bucket ")
    assert "has no key 'cadence'" in error
    assert actions(rig) == [
        ("data put", "ops/cadence", "1h"),
        ("data put", "ops/cadence", "1h -> 2h"),
        ("data delete", "ops/cadence", "2h"),
    ]


def test_empty_value_is_replaced_and_recorded(rig: Rig, bucket: str, command: Command) -> None:
    for value in ("", "2h"):
        assert command("data", "put", "ops/cadence", value, "--yes")[0] == 0
    assert actions(rig) == [("data put", "ops/cadence", ""), ("data put", "ops/cadence", " -> 2h")]


@pytest.mark.parametrize("words", (("put", "ops/cadence", "3h"), ("delete", "ops/cadence")))
def test_write_needs_yes_without_a_terminal(rig: Rig, bucket: str, command: Command, words: tuple[str, ...]) -> None:
    command("data", "put", "ops/cadence", "1h", "--yes")
    code, output, error = command("data", *words)
    assert (code, output) == (2, "")
    assert "needs --yes without a terminal" in error
    assert command("data", "get", "ops/cadence")[1] == "1h\n"


@pytest.mark.parametrize(
    ("key", "value"),
    (
        ("db_password", "secret-word"),
        ("url", "nats://user:secret-word@host:4222"),
        ("json", '{"password": "secret-word"}'),
        ("signs", "secret-word"),
    ),
)
def test_secret_is_masked_unless_revealed(rig: Rig, bucket: str, command: Command, key: str, value: str) -> None:
    with (rig.home / "replication.yaml").open("a") as file:
        file.write("checkpoint: {key: {data: ops/signs}}\n")
    shown = command("data", "put", f"ops/{key}", value, "--yes")[1]
    shown += command("data", "get", f"ops/{key}")[1] + command("data", "list", "ops")[1]
    shown += command("data", "get", f"ops/{key}", "--history")[1] + str(actions(rig))
    assert "secret-word" not in shown
    assert shown.count("***") == 5
    assert command("data", "get", f"ops/{key}", "--reveal")[1] == f"{value}\n"


def test_put_repairs_a_configuration_that_waits_for_its_value(rig: Rig, bucket: str, command: Command) -> None:
    rig.settings(data={"ops": kv(rig, bucket)})
    file = rig.home / "replication.yaml"
    file.write_text(file.read_text() + "linger: {data: ops/linger}\n")
    code, _, error = command("check")
    assert code == 2
    assert "linger: data ops/linger: " in error
    assert command("data", "put", "ops/linger", "3s", "--yes")[0] == 0
    assert command("check")[0] == 0
    assert actions(rig) == [("data put", "ops/linger", "3s")]


@pytest.mark.parametrize("words", (["get"], ["get", "--history"], ["list"], ["watch"], ["put", "1", "--yes"]))
def test_unavailable_source_is_one_line_with_the_remedy(
    rig: Rig, bucket: str, command: Command, words: list[str]
) -> None:
    data = {"ops": {"type": "kv", "url": "nats://127.0.0.1:1", "bucket": bucket}}
    rig.settings(data=data)
    operation, *options = words
    code, output, error = command("data", operation, "ops/cadence", *options)
    assert (code, output, error.count("\n")) == (1, "", 1)
    assert error.startswith(f"error: ops/cadence: bucket {bucket} on 127.0.0.1:1 is unavailable: ")
    assert error.endswith("; start or repair the source\n")


@pytest.mark.parametrize(
    ("label", "text"),
    (
        ("opps/x", "source 'opps' is not configured; did you mean 'ops'?"),
        ("ops", "data 'ops': is not a reference; use SOURCE/KEY"),
        ("ops/a*", "ops/a*: is not a key of a bucket; use letters"),
        ("mem/a", "mem/a: a memory source ends with its process"),
    ),
)
def test_wrong_key_is_a_usage_error(bucket: str, command: Command, label: str, text: str) -> None:
    code, output, error = command("data", "put", label, "1", "--yes")
    assert (code, output, error.count("\n")) == (2, "", 1)
    assert text in error


def test_put_refuses_bytes_that_are_not_text(bucket: str, command: Command) -> None:
    code, _, error = command("data", "put", "ops/cadence", "\udcff", "--yes")
    assert code == 2
    assert "ops/cadence: the value is not UTF-8 text" in error


def test_watch_prints_each_change(
    rig: Rig, bucket: str, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command("data", "put", "ops/cadence", "1h", "--yes")
    printed: list[str] = []

    def echo(line: str) -> None:
        printed.append(line)
        if len(printed) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("sr_assets.cli.data.echo", echo)
    from sr_assets.adapters.data import open_source
    from sr_assets.settings import SourceSettings

    with in_background(lambda: command("data", "watch", "ops/cadence")):
        wait_until(lambda: len(printed) == 1, "the first value")
        with open_source("ops", SourceSettings.model_validate(kv(rig, bucket))) as source:
            source.put("cadence", "2h")
    assert [line.split()[1:] for line in printed] == [["ops/cadence", "1h"], ["ops/cadence", "2h"]]


def explained(command: Command, key: str) -> list[dict[str, Any]]:
    code, output, error = command("check", "--explain", key, "--format", "json")
    assert (code, error) == (0, "")
    rows: list[dict[str, Any]] = json.loads(output)
    return rows


def test_explain_shows_the_origin_of_values(bucket: str, command: Command) -> None:
    (row,) = explained(command, "sensor.interval")
    assert row["age_seconds"] >= 0
    assert {**row, "age_seconds": 0} == {
        "key": "sensor.interval",
        "value": "5s",
        "origin": "data mem/a (memory)",
        "age_seconds": 0,
    }
    (row,) = explained(command, "target_stream")
    assert (row["key"], row["value"], row["origin"]) == ("streams.LONDON/S.target_stream", "T", "the file")
    (row,) = explained(command, "lag_messages")
    assert (row["value"], row["origin"]) == ("1", "the default")
    assert {row["key"] for row in explained(command, "data.ops.*")} >= {"data.ops.type", "data.ops.bucket"}


def test_explain_hides_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        f"name: L\nstate_store: {tmp_path}/home\nstreams:\n- {{stream: S, source_url: 'nats://u:secret-word@h', target_url: b}}\n"
        "notify: [{webhook: 'http://h/secret-word'}]\nclear_text_hosts: h\n"
    )
    file.chmod(0o600)
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(file))
    rows = explained(command, "*")
    assert "secret-word" not in str(rows)
    assert {row["value"] for row in rows if row["key"].endswith(("webhook", "source_url"))} == {"***"}


def test_explain_refuses_an_unknown_key(bucket: str, command: Command) -> None:
    code, _, error = command("check", "--explain", "intervall")
    assert code == 2
    assert "--explain intervall: is not a key; did you mean 'interval'?" in error
