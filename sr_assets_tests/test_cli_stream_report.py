"""The partitions in `report STREAM`, from the configuration and the published tables."""

from pathlib import Path

import pytest
import yaml

from sr_assets.cli.stream_report import print_details, stream_partitions, stream_refusals
from sr_assets.settings import Settings, load_settings
from sr_assets_tests.exposed import SITES, STREAM, configured, expose_tables, write_stream


def partitioned(home: Path, *subjects: str) -> Settings:
    """Return a configuration of one stream with these partitions."""
    entry = {
        "stream": STREAM,
        "name": SITES[0],
        "source_url": "a:1",
        "target_url": "b:1",
        "target_stream": "COPY",
        "partitions": {"subjects": list(subjects)},
    }
    file = home / "replication.yaml"
    file.write_text(yaml.safe_dump({"name": "HUB", "state_store": str(home), "streams": [entry]}))
    return load_settings(file, {})


@pytest.mark.parametrize("stream", (STREAM, "COPY"))
def test_report_of_a_stream_has_the_progress_of_its_partitions(tmp_path: Path, stream: str) -> None:
    settings = partitioned(tmp_path, "reg.0.>", "reg.1.>", "reg.2.>")
    before = stream_partitions(settings, stream)
    assert [(row["partition"], row["subject"], row["next_sequence"]) for row in before] == [
        (0, "reg.0.>", None),
        (1, "reg.1.>", None),
        (2, "reg.2.>", None),
    ]
    expose_tables(tmp_path)
    rows = stream_partitions(settings, stream)
    assert [(row["lag_messages"], row["next_sequence"]) for row in rows] == [(5, 41), (None, 41), (None, None)]
    assert rows[0]["watermark"] is not None


def test_report_counts_refusals_by_kind(tmp_path: Path) -> None:
    counters = {
        "impossible_hops": {"copying": 2.0},
        "refused_senders": {"": 3.0},
        "forged_copies": {},
        "seen_bytes": {"": 9},
    }
    settings = configured(tmp_path)
    write_stream(tmp_path, SITES[0], {"created_ns": 1, "counters": counters})
    assert [(row["kind"], row["count"]) for row in stream_refusals(settings, STREAM)] == [
        ("impossible_hops", 2),
        ("refused_senders", 3),
    ]
    assert stream_refusals(settings, "OTHER") == []


def test_report_shows_no_progress_of_a_changed_partition(tmp_path: Path) -> None:
    expose_tables(tmp_path)
    settings = partitioned(tmp_path, "reg.0.>", "other.>")
    assert [row["next_sequence"] for row in stream_partitions(settings, STREAM)] == [41, None]
    assert stream_partitions(settings, "OTHER") == []


def test_report_prints_partitions_as_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expose_tables(tmp_path)
    lanes = stream_partitions(partitioned(tmp_path, "reg.0.>", "reg.1.>"), STREAM)
    print_details("table", [], {"links": [], "partitions": lanes})
    printed = capsys.readouterr().out
    assert "Partitions" in printed
    assert "Links" not in printed
    assert "reg.1.>" in printed
