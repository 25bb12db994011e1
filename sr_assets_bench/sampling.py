"""The sampled path: reading, deciding and copying; a long backlog and its memory; many tracked nodes."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.state.store import SiteState
from sr_assets_bench.rig import ROUNDS, SITE, PeakMemory

if TYPE_CHECKING:
    from sr_assets_bench.rig import Bench

_HOUR_NS: Final = 3_600_000_000_000
_NEW_MESSAGES: Final = 1_000
_SHORT_SHARE: Final = 10
_RULES: Final = {"inspect_duration": "1h", "warn_duration": "30m"}
_KEYS: Final = {"inspect_field": "sender", **_RULES}
_WAYS: Final[dict[str, dict[str, Any]]] = {"subject": {"inspect_subject_token": 2, **_RULES}, "field": _KEYS}
_SIZES: Final = {512: "512", 7_000: "7k", 64_000: "64k"}


def measure_sampled(bench: Bench, messages: int, senders: int, payload_bytes: int) -> dict[str, Any]:
    """Measure a known fleet in which one message in ten forces a copy; `messages_per_second` is the whole run."""
    stream = "SAMPLED"
    bench.create(bench.source, stream)
    bench.publish(stream, senders, senders, payload_bytes)
    entry = {"stream": stream, "target_subject_prefix": "sample", "inspect_force_field": "now", **_KEYS}
    settings = bench.settings([entry])
    first, first_seconds = bench.run(settings, stream)
    rates, share = [], []
    for _ in range(ROUNDS):
        bench.publish(stream, messages, senders, payload_bytes, forced_share=0.1)
        report, seconds = bench.run(settings, stream)
        rates.append(report.messages / seconds)
        share.append(report.copied / report.messages)
    return {
        "senders": senders,
        "messages": messages,
        "payload_bytes": payload_bytes,
        "copied_share": round(statistics.median(share), 3),
        "messages_per_second": round(statistics.median(rates)),
        "all_new_per_second": round(first.messages / first_seconds),
    }


def measure_unread(bench: Bench, messages: int, senders: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Measure a known fleet without due nodes, by subject and by JSON field, at three sizes; medians of the rounds.

    By subject, payloads stay at the source. All other work is the same.
    """
    entries, rates = {}, {}
    for way, keys in _WAYS.items():
        for size, label in _SIZES.items():
            stream = f"{way}_{label}".upper()
            bench.create(bench.source, stream)
            bench.publish(stream, senders, senders, size)
            entries[stream] = {"stream": stream, "target_subject_prefix": stream.lower(), **keys}
            rates[stream] = (size, list[float]())
    settings = bench.settings(list(entries.values()))
    for stream in entries:
        bench.run(settings, stream)
    for _ in range(rounds):
        for stream, (size, measured) in rates.items():
            bench.publish(stream, messages, senders, size)
            report, seconds = bench.run(settings, stream)
            measured.append(report.messages / seconds)
    figures: dict[str, Any] = {"messages": messages, "senders": senders}
    for stream, (_, measured) in rates.items():
        figures[f"{stream.lower()}_per_second"] = round(statistics.median(measured))
    figures["large_to_small"] = round(figures["subject_64k_per_second"] / figures["subject_512_per_second"], 2)
    return figures


def measure_backlog(bench: Bench, messages: int, senders: int) -> dict[str, Any]:
    """Measure a backlog of 1 KB messages and a tenth of it, and the peak memory of our processes.

    The fleet is known, so only the backlog grows.
    """
    stream = "BACKLOG"
    bench.create(bench.source, stream)
    bench.publish(stream, senders, senders, 1_000)
    settings = bench.settings([{"stream": stream, "target_subject_prefix": "backlog", **_KEYS}])
    bench.run(settings, stream)
    figures: dict[str, Any] = {"senders": senders}
    for label, count in (("short", messages // _SHORT_SHARE), ("long", messages)):
        bench.publish(stream, count, senders, 1_000)
        with PeakMemory(bench.home) as peak:
            report, seconds = bench.run(settings, stream)
        figures[f"{label}_messages"] = report.messages
        figures[f"{label}_per_second"] = round(report.messages / seconds)
        figures[f"{label}_peak_mib"] = peak.most_bytes >> 20
    figures["long_to_short"] = round(figures["long_per_second"] / figures["short_per_second"], 2)
    return figures


def measure_tracked(bench: Bench, known: int) -> dict[str, Any]:
    """Measure a run of 1,000 messages with `known` known nodes, each with its history and its newest message."""
    stream = f"KNOWN_{known}"
    bench.create(bench.source, stream)
    bench.publish(stream, _NEW_MESSAGES, _NEW_MESSAGES, 1_000)
    settings = bench.settings([{"stream": stream, "target_subject_prefix": "known", **_KEYS}])
    bench.run(settings, stream)
    _make_known(bench, stream, known - _NEW_MESSAGES)
    seconds = []
    for _ in range(ROUNDS):
        bench.publish(stream, _NEW_MESSAGES, _NEW_MESSAGES, 1_000)
        seconds.append(bench.run(settings, stream)[1])
    return {"nodes": known, "messages": _NEW_MESSAGES, "run_seconds": round(statistics.median(seconds), 2)}


def _make_known(bench: Bench, stream: str, count: int) -> None:
    """Write known nodes into the state like earlier runs; none is due within the hour."""
    with SiteState(bench.home / "sites" / SITE) as state, state.transaction():
        now_ns, row = time.time_ns(), {"stream": stream, "count": count}
        state.connection.execute(
            "INSERT INTO nodes BY NAME SELECT $stream AS stream, 'known' || i || '.example.net' AS node,"
            " $now AS first_seen_ns, $now AS seen_ns, 1 AS sequence, $now AS copied_ns, 1000 AS copied_bytes,"
            " 'up' AS status, $now AS status_since_ns, 0 AS times_retired, 1 AS transition,"
            " $now + $hour AS deadline_ns FROM range($count) AS t(i)",
            {**row, "now": now_ns, "hour": _HOUR_NS},
        )
        state.connection.execute(
            "INSERT INTO transitions BY NAME SELECT uuid()::VARCHAR AS event_id, $stream AS stream,"
            " 'known' || i || '.example.net' AS node, 'new' AS event, $now AS event_ns, $now AS detected_ns,"
            " $now AS seen_ns, 0 AS age_ns, 1 AS sequence, 1 AS transition, false AS late, false AS returned,"
            " false AS outbox FROM range($count) AS t(i)",
            {**row, "now": now_ns},
        )
        state.connection.execute(
            "INSERT INTO snapshots SELECT $stream, 'known' || i || '.example.net', 1, (SELECT min(file) FROM snapshots"
            " WHERE stream = $stream) FROM range($count) AS t(i)",
            row,
        )
