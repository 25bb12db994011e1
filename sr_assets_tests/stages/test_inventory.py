"""The daily inventory: Spark's counts against a count of each node and day."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pytest

from sr_assets.adapters.published.daily import INVENTORY
from sr_assets.adapters.published.inventory import missing_nodes, values_of_day, wrong_sums
from sr_assets.adapters.published.queries import unfinished_dates
from sr_assets.adapters.spark.engine import KEEP_SECONDS, use_engine
from sr_assets.adapters.spark.session import leave_session, open_session
from sr_assets.domain.days import Day, dates_between, day_of
from sr_assets.domain.errors import ConfigurationError, RunError
from sr_assets.settings import Settings, SparkSettings
from sr_assets.stages import daily
from sr_assets.stages.daily import INVENTORY_STAGE
from sr_assets_tests.histories import (
    AFTER,
    BEGIN_NS,
    DAY_NS,
    FIRST,
    HOUR,
    SECOND,
    SITE,
    STREAM,
    Change,
    Histories,
    Message,
    configured,
    publish,
    random_histories,
)

#: A message of the site in `histories` is valid for two intervals of one hour.
HELD_NS = 2 * HOUR
PROPERTIES = ("class", "agent", "agent_version", "os_family", "facts.country", r"facts.a\.b.0")
Row = tuple[int, int, int, int, bool]


@pytest.fixture(scope="module")
def spark(engine_home: Path) -> Iterator[Callable[[], Any]]:
    session = open_session(SparkSettings(), engine_home, "inventory")
    with use_engine(engine_home, KEEP_SECONDS):
        yield lambda: session
    leave_session(session)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return configured(tmp_path, inventory=r"{facts: [country, 'a\.b.0']}")


def rows_of(home: Path) -> dict[tuple[date, str, str | None], Row]:
    with duckdb.connect(str(home / "fleet.duckdb"), read_only=True) as connection:
        rows = connection.execute(
            "SELECT date, property, value, nodes, came, went, all_nodes, final, name, stream FROM inventory_daily"
        ).fetchall()
    assert {row[-2:] for row in rows} <= {(SITE, STREAM)}
    by_key: dict[tuple[date, str, str | None], Row] = {row[:3]: row[3:8] for row in rows}
    assert len(by_key) == len(rows)
    return by_key


def random_messages(chance: random.Random, histories: Histories, until_ns: int) -> list[Message]:
    """Return messages of the nodes while they are up; some nodes send rarely, some change their values."""
    messages = []
    for node, changes in histories.items():
        interval_ns = chance.choice([HOUR, HOUR, 30 * HOUR])
        country = chance.choice(["uk", "fr", None])
        for change, end in zip(changes, [*(later.at_ns for later in changes[1:]), until_ns + HOUR], strict=True):
            at_ns = change.at_ns
            while AFTER[change.event] == "up" and at_ns < end:
                version = chance.choice(["0.30.2", "0.31.0"])
                content = {
                    "classes": chance.sample(["web", "db", "base"], chance.randrange(4)),
                    "agents": [{"name": "rpcutil", "version": version}, {"name": "puppet"}],
                    "build_info": {"version": version},
                    "facts": {"country": country, "os": {"family": chance.choice(["Debian", "RedHat"])}, "a.b": [7]},
                }
                messages.append(Message(node, at_ns, content))
                at_ns += chance.randrange(1, 2 * interval_ns)
    chance.shuffle(messages)
    return messages


def values_of(content: Any) -> set[tuple[str, str | None]]:
    """Return the properties in a message of `random_messages`; None stands for a node without a recent message."""
    if content is None:
        return {(name, None) for name in PROPERTIES}
    version, classes = content["build_info"]["version"], content["classes"]
    single = (version, content["facts"]["os"]["family"], content["facts"]["country"], "7")
    return {
        *(("class", name) for name in classes or [None]),
        *(("agent", name) for name in (f"rpcutil {version}", "puppet")),
        *zip(PROPERTIES[2:], single, strict=True),
    }


def held_on(day: Day, changes: list[Change], messages: list[Message], watermark_ns: int) -> set[tuple[str, str | None]]:
    """Return a node's properties on a day, or an empty set if it was not part of the fleet."""
    end_ns = min(day.next_ns, watermark_ns)
    ends = [*(change.at_ns for change in changes[1:]), end_ns]
    if not any(
        AFTER[change.event] != "retired" and max(change.at_ns, day.first_ns) < min(until, end_ns)
        for change, until in zip(changes, ends, strict=True)
    ):
        return set()
    recent = [message for message in messages if day.first_ns - HELD_NS <= message.at_ns < day.next_ns]
    return values_of(max(recent, key=lambda message: message.at_ns).content if recent else None)


@pytest.mark.parametrize("seed", (1, 2))
def test_daily_counts_match_a_count_of_each_node(
    seed: int, settings: Settings, spark: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All days in one portion, or in portions of days and nodes."""
    if seed > 1:
        monkeypatch.setattr(daily, "_HELD_ROWS", 200)
        monkeypatch.setattr(daily, "_JOB_ROWS", 4_000)
    chance = random.Random(seed)
    watermark_ns = BEGIN_NS + 4 * DAY_NS + 7 * HOUR
    histories = random_histories(seed, 60, watermark_ns)
    histories = {
        node: [change._replace(at_ns=change.at_ns // 1000 * 1000) for change in of_node]
        for node, of_node in histories.items()
    }
    messages = random_messages(chance, histories, watermark_ns)
    messages = [message._replace(at_ns=message.at_ns // 1000 * 1000) for message in messages]
    publish(settings.home, histories, watermark_ns, messages=messages)
    dates = list(dates_between(FIRST, FIRST + timedelta(days=4)))
    written = INVENTORY_STAGE.compute_days(settings, dates, spark)
    rows = rows_of(settings.home)
    assert sum(written.values()) == len(rows)
    by_node = {node: [message for message in messages if message.node == node] for node in histories}
    for local_date in dates:
        day, eve = day_of(local_date), day_of(local_date - timedelta(days=1))
        now = {node: held_on(day, changes, by_node[node], watermark_ns) for node, changes in histories.items()}
        before = {node: held_on(eve, changes, by_node[node], watermark_ns) for node, changes in histories.items()}
        nodes = Counter(value for held in now.values() for value in held)
        came = Counter(value for node, held in now.items() for value in held - before[node])
        went = Counter(value for node, held in before.items() for value in held - now[node])
        all_nodes = sum(map(bool, now.values()))
        expected = {
            (local_date, *value): (nodes[value], came[value], went[value], all_nodes, day.next_ns <= watermark_ns)
            for value in nodes.keys() | went.keys()
        }
        assert {key: row for key, row in rows.items() if key[0] == local_date} == expected
        assert wrong_sums(settings.home, day) == 0
        assert missing_nodes(settings.home, day) == 0


def test_messages_of_any_shape_are_counted(settings: Settings, spark: Callable[[], Any]) -> None:
    shapes: dict[str, tuple[object, bool]] = {
        "plain": ({"classes": "web", "agents": "none", "country": "uk"}, False),
        "facts": ({"country": {"code": "fr"}, "osfamily": "Suse"}, True),
        "nulls": ({"classes": [None], "facts": {"country": None}, "agents": [{}, 3]}, True),
        "list": (["web"], True),
    }
    at_ns = BEGIN_NS + HOUR
    publish(
        settings.home,
        {node: [Change(at_ns, "new", None)] for node in shapes},
        BEGIN_NS + DAY_NS,
        messages=[Message(node, at_ns, content, registration) for node, (content, registration) in shapes.items()],
    )
    INVENTORY_STAGE.compute_days(settings, [FIRST], spark)
    nodes = {key[1:]: row[0] for key, row in rows_of(settings.home).items()}
    assert nodes == {
        ("class", "web"): 1,
        ("class", None): 3,
        ("agent", None): 4,
        ("agent_version", None): 4,
        ("os_family", "Suse"): 1,
        ("os_family", None): 3,
        ("facts.country", "uk"): 1,
        ("facts.country", '{"code":"fr"}'): 1,
        ("facts.country", None): 2,
        (r"facts.a\.b.0", None): 4,
    }
    assert wrong_sums(settings.home, day_of(FIRST)) == 0
    assert values_of_day(settings.home, FIRST, 1).values[0] == ("agent", None, 4, 4, 0)


def test_local_day_is_final_once_all_its_messages_are_copied(tmp_path: Path, spark: Callable[[], Any]) -> None:
    settings = configured(tmp_path, inventory="{timezone: America/New_York}")
    day = day_of(FIRST, "America/New_York")
    messages = [
        Message("a", day.first_ns - SECOND, {"classes": ["old"]}),
        Message("a", day.next_ns - SECOND, {"classes": ["new"]}),
    ]
    publish(settings.home, {"a": [Change(day.first_ns - SECOND, "new", None)]}, day.next_ns - 1, messages=messages)
    INVENTORY_STAGE.compute_days(settings, [FIRST], spark)
    rows = rows_of(settings.home)
    assert rows[FIRST, "class", "new"] == (1, 1, 0, 1, False)
    assert rows[FIRST, "class", "old"] == (0, 0, 1, 1, False)
    assert unfinished_dates(settings.home, INVENTORY) == [(FIRST, (day.next_ns - 1) // 1000 * 1000)]
    publish(settings.home, {"a": [Change(day.first_ns - SECOND, "new", None)]}, day.next_ns)
    INVENTORY_STAGE.compute_days(settings, [FIRST], spark)
    assert rows_of(settings.home)[FIRST, "class", "new"] == (1, 1, 0, 1, True)
    assert unfinished_dates(settings.home, INVENTORY) == []


def test_missing_or_expired_history_is_an_error(settings: Settings, spark: Callable[[], Any]) -> None:
    with pytest.raises(RunError, match="nothing is published yet"):
        INVENTORY_STAGE.compute_days(settings, [FIRST], spark)
    publish(settings.home, {}, BEGIN_NS + 200 * DAY_NS)
    with pytest.raises(ConfigurationError, match=r"has expired \(advisories.retention\); the earliest .* 2026-05-20"):
        INVENTORY_STAGE.compute_days(settings, [FIRST], spark)
    latest = FIRST + timedelta(days=199)
    assert INVENTORY_STAGE.compute_days(settings, [latest], spark) == {latest: 0}
