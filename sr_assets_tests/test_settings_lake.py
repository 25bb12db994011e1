"""The block `lake`: its defaults, its path, and values that one line refuses."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from sr_assets.definitions import build
from sr_assets.domain.errors import ConfigurationError
from sr_assets.settings import Settings, load_settings


def configured(tmp_path: Path, **lake: Any) -> Settings:
    entry = {"name": "paris", "stream": "NODES", "source_url": "a:1", "target_url": "b:1", "lake": lake}
    file = tmp_path / "replication.yaml"
    other = {"name": "paris", "stream": "PLAIN", "source_url": "a:1", "target_url": "b:1"}
    file.write_text(yaml.safe_dump({"name": "X", "streams": [entry, other]}))
    return load_settings(file, {"SR_ASSETS_HOME": str(tmp_path)})


def test_lake_has_the_defaults_of_the_reference(tmp_path: Path) -> None:
    lake = configured(tmp_path, path="lake").streams[0].lake
    assert lake is not None
    assert (lake.format, lake.partition_by, lake.options) == ("parquet", ("date",), {})
    assert lake.location(tmp_path) == str(tmp_path / "lake")


@pytest.mark.parametrize(
    ("path", "location"),
    (
        ("/data/lake/", "/data/lake"),
        ("~/lake", str(Path.home() / "lake")),
        ("s3a://bucket/lake/", "s3a://bucket/lake"),
        ("file:/mnt/lake", "file:/mnt/lake"),
        ("abfss://c@account.dfs.core.windows.net/lake", "abfss://c@account.dfs.core.windows.net/lake"),
    ),
)
def test_path_of_lake_is_absolute_or_a_url(tmp_path: Path, path: str, location: str) -> None:
    lake = configured(tmp_path, path=path).streams[0].lake
    assert lake is not None
    assert lake.location(tmp_path) == location


@pytest.mark.parametrize(
    ("lake", "line"),
    (
        ({}, "lake.path: is required"),
        (
            {"path": "/"},
            "lake.path: '/' is not a folder for a lake; use a path without wildcards, or s3a://bucket/folder",
        ),
        ({"path": "a/*"}, "lake.path: 'a/*' is not a folder for a lake"),
        ({"path": "s3a://key:hidden@bucket/a"}, "lake.path: contains a login; set it in spark.config"),
        ({"path": "a", "format": "no such"}, "lake.format: 'no such' is not a format; use parquet"),
        (
            {"path": "a", "partition_by": "payload"},
            "lake.partition_by.0: 'payload' is not one of date, sender, subject",
        ),
        ({"path": "a", "partition_by": ["date", "date"]}, "lake.partition_by: names 'date' twice; remove one"),
        ({"path": "a", "options": {"Path": "b"}}, "lake.options: Path: is fixed by the lake's path; remove it"),
        ({"path": "a", "options": "zstd"}, "lake.options: must be a mapping of Spark's options"),
        ({"path": "a", "every": "1h"}, "lake: unknown key 'every'"),
    ),
)
def test_invalid_lake_is_one_line(tmp_path: Path, lake: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        configured(tmp_path, **lake)
    assert line in str(raised.value)
    assert "hidden" not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("path", "line"),
    (
        ("lake/a/", "stream 'B': lake.path: is the lake of stream 'A' too; set another path"),
        ("lake", "stream 'A': lake.path: is inside the lake of stream 'B'; set another path"),
    ),
)
def test_lake_cannot_be_in_the_folder_of_another(tmp_path: Path, path: str, line: str) -> None:
    entry = {"source_url": "a:1", "target_url": "b:1"}
    streams = [
        {**entry, "stream": "A", "lake": {"path": "lake/a"}},
        {**entry, "stream": "B", "lake": {"path": path}},
    ]
    file = tmp_path / "replication.yaml"
    file.write_text(yaml.safe_dump({"name": "X", "streams": streams}))
    with pytest.raises(ConfigurationError, match=line):
        load_settings(file, {"SR_ASSETS_HOME": str(tmp_path)})


def test_stream_with_a_lake_has_its_asset_and_shares_the_job(tmp_path: Path) -> None:
    definitions = build(configured(tmp_path, path="lake"))
    key, graph = dg.AssetKey(["paris", "NODES", "lake"]), definitions.resolve_asset_graph()
    assert {parent.path[-1] for parent in graph.get(key).parent_keys} == {"source"}
    assert (graph.get(key).group_name, graph.get(key).kinds) == ("paris", {"spark", "parquet", "NODES"})
    assert definitions.resolve_job_def("lakes").asset_layer.executable_asset_keys == {key}
    schedule = definitions.resolve_schedule_def("hourly_lakes")
    assert (schedule.job_name, schedule.default_status) == ("lakes", dg.DefaultScheduleStatus.RUNNING)
    assert key not in definitions.resolve_job_def("paris_replication").asset_layer.executable_asset_keys
