"""What every asset's page says: columns, rows, and the last day by hour, which each run carries on."""

import base64
from datetime import date, timedelta
from xml.etree import ElementTree as ET

import dagster as dg

from sr_assets.assets.described import BY_HOUR, Page, hours_recorded
from sr_assets.assets.pictures import hourly_chart, line_chart
from sr_assets.domain.hours import Hours, carried_on, hours_until

HOUR_NS = 3600 * 10**9
NOW_NS = 493_000 * HOUR_NS + 5
MOST_BYTES = 30_000


def test_numbers_of_an_hour_add_up_levels_are_the_newest_and_a_day_is_kept() -> None:
    hours: Hours = {}
    for hour in range(30):
        for copied in (2, 3):
            hours = carried_on(hours, NOW_NS + hour * HOUR_NS, {"copied": copied}, {"lag": hour})
    assert list(hours) == hours_until(NOW_NS + 29 * HOUR_NS)
    assert list(hours.values()) == [{"copied": 5, "lag": hour} for hour in range(6, 30)]


def test_a_run_carries_on_what_the_last_one_recorded() -> None:
    key, page = dg.AssetKey("replica"), Page({"subject": "VARCHAR"}, 7, {"copied": 2}, {"lag": 1})
    with dg.DagsterInstance.ephemeral() as instance:
        for _ in range(2):
            metadata = page.metadata(hours_recorded(instance, key), NOW_NS)
            instance.report_runless_asset_event(dg.AssetMaterialization(key, metadata=metadata))
        assert hours_recorded(instance, key) == {hours_until(NOW_NS)[-1]: {"copied": 4, "lag": 1}}
    assert metadata["dagster/row_count"] == 7
    assert BY_HOUR not in Page({"subject": "VARCHAR"}, 7).metadata({}, NOW_NS)


def test_the_picture_of_a_day_is_small_and_has_every_line() -> None:
    hours = hours_until(NOW_NS)
    lines = {"copied": [10**6] * 24, "<skipped>": [None, *range(23)], "lag": [None] * 24}
    markdown = hourly_chart("the last day", hours, lines)
    drawn = base64.b64decode(markdown.removeprefix("![the last day](data:image/svg+xml;base64,").removesuffix(")"))
    picture = ET.fromstring(drawn)
    assert len(markdown) < MOST_BYTES
    assert len(picture.findall("{*}polyline")) == 3
    assert {"copied 1,000,000", "<skipped> 22", "lag"} <= {text.text for text in picture.findall("{*}text")}


def test_the_picture_of_a_month_is_small() -> None:
    days = [(date(2026, 1, 1) + timedelta(days=number)).isoformat() for number in range(30)]
    lines = {
        f"0.{version}.0": [(day, float(version * number)) for number, day in enumerate(days)] for version in range(6)
    }
    markdown = line_chart("nodes", "nodes", lines)
    assert len(base64.b64decode(markdown.rpartition(",")[2].removesuffix(")"))) < MOST_BYTES
