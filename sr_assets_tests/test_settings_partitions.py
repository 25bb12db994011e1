"""The block `partitions` of a stream: its lanes, and one line for each contradiction."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from sr_assets.domain.errors import ConfigurationError
from sr_assets.settings import StreamSettings, load_settings

FILTER = "nodes.{p}.>"


def load(folder: Path, partitions: Any, **keys: Any) -> StreamSettings:
    """Load a stream with a block `partitions`."""
    entry = {"stream": "NODES", "source_url": "a:1", "target_url": "b:1", "partitions": partitions, **keys}
    file = folder / "replication.yaml"
    file.write_text(yaml.safe_dump({"name": "X", "streams": [entry]}))
    return load_settings(file, {}).streams[0]


@pytest.mark.parametrize(
    ("partitions", "lanes"),
    (
        ({"count": 3, "filter": FILTER}, ("nodes.0.>", "nodes.1.>", "nodes.2.>")),
        ({"count": 2, "filter": "nodes.p{p}.>"}, ("nodes.p0.>", "nodes.p1.>")),
        ({"count": 1, "filter": FILTER}, ("nodes.0.>",)),
        ({"subjects": ["a.>", "b.*"]}, ("a.>", "b.*")),
        ({"subjects": ["a.>", "b.*"], "count": 2}, ("a.>", "b.*")),
    ),
)
def test_partitions_name_the_filter_of_each_lane(tmp_path: Path, partitions: Any, lanes: tuple[str, ...]) -> None:
    stream = load(tmp_path, partitions)
    assert (stream.lanes, stream.writers) == (lanes, len(lanes))
    assert stream.order == ("stream" if len(lanes) == 1 else "sender")


@pytest.mark.parametrize(
    ("partitions", "keys", "problem"),
    (
        ({"count": 0, "filter": FILTER}, {}, "partitions.count: 0 is not a whole number, 1 to 256"),
        ({"count": 100_000, "filter": FILTER}, {}, "partitions.count: 100000 is not a whole number, 1 to 256"),
        ({"count": 3, "filter": "nodes.>"}, {}, "filter: 'nodes.>' lacks {p}, the number of the partition; use for"),
        ({"filter": FILTER}, {}, "filter: 'nodes.{p}.>' needs count, the number of partitions"),
        ({"count": 2, "filter": "nodes..{p}"}, {}, "filter: 'nodes..0' is not a subject filter"),
        ({"count": 3}, {}, "partitions: has neither filter nor subjects; set count and filter, or subjects"),
        ({"count": 3, "filter": FILTER, "subjects": ["a"]}, {}, "has both filter and subjects"),
        (
            {"subjects": ["a.{p}.>"]},
            {},
            "subjects: 'a.{p}.>' has {p}, which only filter replaces; use count and filter",
        ),
        ({"subjects": []}, {}, "subjects: has 0 subjects; use 1 to 256"),
        ({"subjects": ["a.>", "b"], "count": 3}, {}, "count: 3 contradicts subjects, which has 2 subjects"),
        ({"subjects": ["a.>", "b", "a.*.c"]}, {}, "subjects: 'a.>' and 'a.*.c' overlap"),
        (
            {"count": 2, "filter": FILTER},
            {"filter_subject": "nodes.>"},
            "filter_subject: 'nodes.>' cannot be used with",
        ),
        ({"count": 2, "filter": FILTER}, {"stream": "NODES_{p}"}, "stream: 'NODES_{p}' names several streams"),
        ({"count": 2, "filter": FILTER}, {"workers": 2}, "workers: 2 cannot be used with partitions"),
        ({"count": 2, "filter": FILTER}, {"order": "stream"}, "order: 'stream' cannot be used with partitions"),
    ),
)
def test_partitions_refuse_a_contradiction_in_one_line(
    tmp_path: Path, partitions: Any, keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load(tmp_path, partitions, **keys)
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)
