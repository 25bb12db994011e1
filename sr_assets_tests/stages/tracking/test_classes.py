"""Classes of nodes: their durations and announcements, changes of a node's class, and of the configuration."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sr_assets.assets.entry_assets import StreamAssets
from sr_assets.domain.errors import ConfigurationError
from sr_assets.settings import load_settings
from sr_assets.stages.operator_commands import act_on_node
from sr_assets.stages.report import Stage
from sr_assets_bench.comparison.streams import compare
from sr_assets_tests.reference import Rules, Seen, by_field
from sr_assets_tests.rig import ALL_ON_SPARK, SITE, Command, Rig, Sent
from sr_assets_tests.stages.tracking.test_node_state import SECOND, events

HOUR = 3_600 * SECOND
HOURS = {"inspect_field": "sender", "inspect_duration": "10h"}
WEB = {"name": "web", "match": "web*", "inspect_duration": "4h", "warn_duration": "2h"}
KINDS = [WEB, {"name": "db", "field": "role", "value": "db"}, {"name": "vip", "header": "Kind", "value": "vip"}]


def message(sender: str, role: str = "", kind: str = "") -> Sent:
    headers = f"NATS/1.0\r\nKind: {kind}\r\n\r\n".encode() if kind else b""
    return Sent(json.dumps({"sender": sender, "role": role}).encode(), headers=headers)


def add(rig: Rig, *classes: dict[str, Any], **entry: Any) -> tuple[str, str]:
    stream, advisories = rig.make(), rig.make("ADV")
    advisory = {"subject": f"{advisories}.%s.%v", "reliable": True}
    rig.add(stream, advisory=advisory, classes=list(classes), **{**HOURS, **entry})
    return stream, advisories


def classes_of(rig: Rig) -> dict[str, str | None]:
    return {row["node"]: row["class"] for row in rig.rows("SELECT * FROM node_availability")}


def announced(rig: Rig, advisories: str) -> list[tuple[str, str]]:
    bodies = [json.loads(message.payload) for message in rig.stored(advisories)]
    return [(body["value"], body["event"]) for body in bodies]


@pytest.mark.parametrize("spark", ({}, pytest.param(ALL_ON_SPARK, marks=pytest.mark.nightly)), ids=("here", "on spark"))
def test_first_matching_class_wins_with_its_own_durations(rig: Rig, spark: dict[str, Any]) -> None:
    stream, advisories = add(rig, *KINDS)
    rig.publish(stream, [message("web1", "db"), message("a", "db", "vip"), message("b", "x", "vip"), message("c", "x")])
    rig.drain(spark=spark)
    assert classes_of(rig) == {"web1": "web", "a": "db", "b": "vip", "c": None}
    rig.travel(hours=4.5)
    rig.drain(spark=spark)
    assert events(rig) == [
        ("a", "new"),
        ("b", "new"),
        ("c", "new"),
        *(("web1", e) for e in ("new", "timeout", "expire")),
    ]
    rows = {row["node"]: row["class"] for row in rig.rows("node_advisories")}
    assert rows == {"web1": "web", "a": "db", "b": "vip", "c": None}
    assert rig.row("retired_nodes")["class"] == "web"
    assert len(announced(rig, advisories)) == 6


def test_change_of_class_takes_effect_with_its_message(rig: Rig) -> None:
    slow = {"name": "slow", "field": "role", "value": "slow", "warn_duration": "5h"}
    fast = {"name": "fast", "field": "role", "value": "fast", "inspect_duration": "4h", "warn_duration": "2h"}
    stream, _ = add(rig, slow, fast)
    rig.publish(stream, [message("a", "slow")])
    rig.drain()
    rig.travel(hours=3)
    # The silence before this message belongs to the class `slow`.
    rig.publish(stream, [message("a", "fast")])
    rig.drain()
    assert (events(rig), classes_of(rig)) == ([("a", "new")], {"a": "fast"})
    rig.travel(hours=3)
    rig.drain()
    rig.publish(stream, [message("a", "slow")])
    rig.drain()
    rows = rig.rows("SELECT event, class, transition FROM node_advisories ORDER BY transition")
    assert [tuple(row.values()) for row in rows] == [("new", "slow", 1), ("timeout", "fast", 2), ("recover", "slow", 3)]
    assert classes_of(rig) == {"a": "slow"}


def test_history_of_changing_classes_equals_the_independent_rules(rig: Rig) -> None:
    fast = {"name": "fast", "field": "role", "value": "fast", "inspect_duration": "1h", "warn_duration": "30m"}
    stream, advisories = add(rig, fast, inspect_duration="4h", warn_duration="2h")
    chance = random.Random(7)
    for _ in range(15):
        nodes = [node for node in "abcdefgh" if chance.random() < 0.3]
        rig.publish(stream, [message(node, chance.choice(["fast", "slow"])) for node in nodes])
        rig.drain()
        rig.travel(minutes=32)

    def durations(seen: Seen) -> tuple[int, int]:
        fast = json.loads(seen.payload)["role"] == "fast"
        return (HOUR, HOUR // 2) if fast else (4 * HOUR, 2 * HOUR)

    rules = Rules(SITE, SITE, stream, 4 * HOUR, 2 * HOUR, "sender", by_field, durations=durations)
    compared = compare(rig, rules, feed=advisories)
    assert compared.differences == []
    assert {advisory["event"] for advisory in compared.expected.advisories} == {"new", "timeout", "recover", "expire"}


def test_class_without_announcements_publishes_nothing(rig: Rig) -> None:
    stream, advisories = add(rig, {**WEB, "announce": False})
    rig.publish(stream, [message("web1"), message("a")])
    rig.drain()
    for _ in range(2):
        rig.travel(hours=2.1)
        rig.drain()
    rig.publish(stream, [message("web1")])
    rig.drain()
    act_on_node(rig.settings(), "retire", "web1", None)
    assert announced(rig, advisories) == [("a", "new")]
    web = [event for node, event in events(rig) if node == "web1"]
    assert web == ["new", "timeout", "expire", "new", "expire"]
    assert rig.rows("SELECT * FROM node_advisories WHERE class = 'web' AND published_at IS NOT NULL") == []


def test_changed_classes_apply_at_the_next_run(rig: Rig) -> None:
    stream, _ = add(rig, KINDS[1])
    rig.publish(stream, [message("web1"), message("a", "db")])
    rig.drain()
    assert classes_of(rig) == {"web1": None, "a": "db"}
    rig.entries[0]["classes"] = [{**WEB, "inspect_duration": "9h"}, *KINDS[1:]]
    rig.drain()
    assert classes_of(rig) == {"web1": "web", "a": "db"}
    rig.travel(hours=3)
    rig.drain()
    assert ("web1", "timeout") in events(rig)
    del rig.entries[0]["classes"]
    rig.drain()
    assert classes_of(rig) == {"web1": None, "a": None}
    rig.publish(stream, [message("web1")])
    rig.drain()
    assert [event for node, event in events(rig) if node == "web1"] == ["new", "timeout", "recover"]


def test_class_has_its_own_retention_of_retired_nodes(rig: Rig) -> None:
    short = {"inspect_duration": "2h", "warn_duration": "1h"}
    stream, _ = add(
        rig, {**WEB, "retired_retention": "9h"}, {"name": "ci", "match": ["ci*"], "retired_retention": "1h"}, **short
    )
    rig.publish(stream, [message("web1"), message("ci1"), message("a")])
    rig.drain()
    rig.travel(hours=6)
    rig.drain()
    rig.drain()
    assert classes_of(rig) == {"web1": "web", "a": None}


def test_asset_shows_the_nodes_by_class(rig: Rig) -> None:
    stream, _ = add(rig, *KINDS)
    rig.publish(stream, [message("web1"), message("a", "db"), message("b")])
    reports = rig.drain()
    with rig.open() as site:
        metadata = StreamAssets(site.streams[0]).metadata(Stage.NODE_STATE, site, reports[stream])
    assert [metadata[f"class_{name}_nodes"] for name in ("web", "db", "vip")] == [1, 1, 0]


def test_recovery_keeps_the_classes(rig: Rig, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, _ = add(rig, *KINDS)
    rig.publish(stream, [message("web1"), message("a", "db"), message("b")])
    rig.drain()
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(rig.home / "replication.yaml"))
    before = classes_of(rig)
    (rig.home / "sites" / SITE / "state.duckdb").unlink()
    assert command("recover", "--stream", stream)[0] == 0
    rig.drain()
    assert classes_of(rig) == before == {"web1": "web", "a": "db", "b": None}


def test_commands_show_and_count_the_classes(rig: Rig, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, advisories = add(rig, *KINDS)
    rig.add_feed(advisories, name="centre", url=rig.source.url)
    rig.publish(stream, [message("web1"), message("web2"), message("a", "db"), message("b")])
    rig.settings()
    monkeypatch.setenv("SR_ASSETS_CONFIG", str(rig.home / "replication.yaml"))
    counts = "web 2, db 1, vip 0, no class 1; of the 4 newest nodes"
    label = f"{SITE}/{stream}"
    assert f"classes of {label}: no node is known yet" in command("check")[1]
    assert ("classes", "ok", counts) in [
        (row["tried"], row["result"], row["learned"])
        for row in json.loads(command("check", "--connect", "--format", "json")[1])
    ]
    rig.drain()
    rig.drain("centre")
    assert f"classes of {label}: {counts}" in command("check")[1]
    (row, _) = json.loads(command("check", "--format", "json")[1])
    assert row["classes"] == counts
    rows = json.loads(command("nodes", "--format", "json")[1])
    assert {row["node"]: row["class"] for row in rows} == {"web1": "web", "web2": "web", "a": "db", "b": None}
    assert json.loads(command("node", "a", "--format", "json")[1])[0]["class"] == "db"
    (site,) = json.loads(command("summary", "--format", "json")[1])
    assert site["classes"] == "db 1, web 2"
    page = rig.home / "status.html"
    assert command("status-page", str(page))[0] == 0
    assert "classes: <bdi>db 1, web 2</bdi>" in page.read_text()


def load(tmp_path: Path, *classes: dict[str, Any], top: bool = False, **entry: Any) -> Any:
    file = tmp_path / "replication.yaml"
    stream = {"stream": "REG", "source_url": "a", "target_url": "b", **HOURS, **entry}
    document = {"name": "x", "streams": [stream if top else {**stream, "classes": list(classes)}]}
    file.write_text(json.dumps({**document, "classes": list(classes)} if top else document))
    return load_settings(file, {})


def test_classes_of_the_top_level_are_the_default(tmp_path: Path) -> None:
    (stream,) = load(tmp_path, WEB, {"name": "all", "match": "*", "warn_duration": "1h"}, top=True).streams
    assert [stream.policy_of(name).warning_ns // SECOND for name in ("web", "all", None)] == [7200, 3600, 18000]
    assert [stream.policy_of(name).interval_ns // SECOND for name in ("web", "all", None)] == [14_400, 36_000, 36_000]
    (stream,) = load(tmp_path, WEB, top=True, classes=[]).streams
    assert stream.node_classes is None


@pytest.mark.parametrize(
    ("classes", "problem"),
    (
        ([{"match": "a"}], "classes.0.name: "),
        ([{"name": "a"}], "classes.0: class 'a' needs match, or field and value, or header and value; set exactly one"),
        ([{"name": "a", "match": "x", "value": "y"}], "classes.0: class 'a' needs match, or field and value"),
        ([{"name": "a", "field": "x"}], "classes.0: class 'a' needs match, or field and value"),
        ([{"name": "a", "field": "x", "header": "y", "value": "z"}], "classes.0: class 'a' needs match, or field and"),
        ([{"name": "a", "field": "a.#.b", "value": "z"}], "classes.0.field: 'a.#.b' has the gjson array query '#'"),
        ([{"name": "a", "header": "a b", "value": "z"}], "classes.0.header: 'a b' is not a header name"),
        ([{"name": "a", "match": "x", "warn_duration": "soon"}], "classes.0.warn_duration: 'soon' is not a duration"),
        ([{"name": "a", "match": "x", "announce": "no"}], "classes.0.announce: 'no' is neither true nor false"),
        (
            [{"name": "a", "match": "x", "warn_duration": "20h"}],
            "classes.0.warn_duration: class 'a': warn_duration (72000s)",
        ),
        ([{"name": "a", "match": "x"}, {"name": "a", "match": "y"}], "classes: class 'a' appears twice; rename one"),
        (
            [{"name": "a", "match": "web*"}, {"name": "b", "match": ["web1", "web2*"]}],
            (
                "classes: class 'b' (match 'web1', 'web2*') gets no message, because the earlier class 'a' (match 'web*')"
                " matches them all; put 'b' first, or remove it"
            ),
        ),
        (
            [{"name": "a", "match": "*"}, {"name": "b", "field": "x", "value": "y"}],
            "class 'b' (field 'x', value 'y') gets no",
        ),
        (
            [{"name": "a", "header": "x", "value": "y"}, {"name": "b", "header": "x", "value": "y"}],
            "class 'b' (header 'x'",
        ),
    ),
)
def test_contradictory_classes_are_refused(tmp_path: Path, classes: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load(tmp_path, *classes)
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def test_overlapping_classes_are_accepted(tmp_path: Path) -> None:
    pairs = (("web?", "web*"), ("web1", "web[12]"), ("a*b", "a*"), ("*.uk", "web*"))
    for first, second in pairs:
        load(tmp_path, {"name": "a", "match": first}, {"name": "b", "match": second})
    load(tmp_path, {"name": "a", "field": "x", "value": "y"}, {"name": "b", "field": "x", "value": "z"})


def test_classes_need_sampling(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="classes: needs sampling"):
        load(tmp_path, WEB, inspect_field=None, inspect_duration=None)
