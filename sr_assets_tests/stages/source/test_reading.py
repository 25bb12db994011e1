"""The size of the next range."""

import json
from pathlib import Path

import pytest

from sr_assets.adapters.nats.stream_info import parse_stream_info
from sr_assets.domain.positions import SequenceRange
from sr_assets.settings import load_settings
from sr_assets.stages.source.reading import next_range

FULL = {
    "config": {
        "name": "REG",
        "subjects": ["reg.>"],
        "retention": "limits",
        "num_replicas": 1,
        "max_msgs_per_subject": -1,
    },
    "created": "2026-01-01T00:00:00Z",
    "state": {"first_seq": 1, "last_seq": 10_000_000, "messages": 10_000_000, "bytes": 1_000_000_000},
}


@pytest.mark.parametrize("batch_messages", (50_000, 500_000, 3_000_000))
@pytest.mark.parametrize("catch_up_messages", (1, 500_000))
def test_tracked_range_never_exceeds_the_limit_of_the_fold(
    tmp_path: Path, batch_messages: int, catch_up_messages: int
) -> None:
    servers = {"source_url": "nats://a:1", "target_url": "nats://b:1", "target_stream": "COPY"}
    sizes = {"batch_messages": batch_messages, "catch_up_messages": catch_up_messages}
    file = tmp_path / "replication.yaml"
    file.write_text(json.dumps({"name": "london", "streams": [{"stream": "REG", **servers, **sizes}]}))
    entry = load_settings(file, {"SR_ASSETS_HOME": str(tmp_path)}).streams[0]
    source = parse_stream_info(FULL, (2, 11, 0))
    size = batch_messages if catch_up_messages == 1 else 500_000
    assert next_range(entry, 1, source, 10_000_000, payloads=False, cores=lambda: 64) == SequenceRange(
        1, 1 + min(size, 500_000)
    )
    assert next_range(entry, 1, source, 10_000_000, payloads=False) == SequenceRange(1, 1 + batch_messages)
