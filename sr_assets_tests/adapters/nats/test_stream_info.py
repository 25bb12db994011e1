"""Stream info, reduced from the response of a server."""

import pytest

from sr_assets.adapters.nats.stream_info import parse_stream_info
from sr_assets.domain.positions import parse_rfc3339_ns


@pytest.mark.parametrize(
    ("silences_seconds", "leader", "expected"),
    (
        ((), "a", 0.0),
        ((0.5, 1.9), "a", 0.0),
        ((9.0, 1.0), "a", 0.0),
        ((9.0, 7.0), "a", 7.0),
        ((9.0, 1.0, 8.0, 7.0), "a", 7.0),
        ((9.0, 7.0), "", None),
    ),
)
def test_info_counts_until_the_leaders_last_contact_with_a_majority(
    silences_seconds: tuple[float, ...], leader: str, expected: float | None
) -> None:
    replicas = [{"active": int(seconds * 1e9)} for seconds in silences_seconds]
    state = {"messages": 0, "bytes": 0, "first_seq": 0, "last_seq": 0}
    answer = {
        "config": {"name": "S"},
        "created": "2026-01-31T12:00:00Z",
        "ts": "2026-01-31T12:00:10Z",
        "state": state,
        "cluster": {"leader": leader, "replicas": replicas},
    }
    info = parse_stream_info(answer, (2, 11, 0))
    assert info.in_contact is (expected == 0.0)
    assert info.ts_ns == (None if expected is None else parse_rfc3339_ns("2026-01-31T12:00:10Z") - int(expected * 1e9))
