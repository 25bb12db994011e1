"""The duration of a metrics scrape for many streams, idle and after work at every site."""

from __future__ import annotations

import statistics
import time
import urllib.request
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.state.status_file import SiteStatus, StreamStatus, write_status
from sr_assets.operate.metrics import Exposition, MetricsServer

if TYPE_CHECKING:
    from sr_assets.settings import Settings
    from sr_assets_bench.rig import Bench

STREAMS: Final = 10
SCRAPES: Final = 10
_SAMPLED: Final[dict[str, Any]] = {
    "inspect_field": "sender",
    "inspect_duration": "1h",
    "advisory": {"subject": "adv.%s.%v"},
}
_EVENTS: Final = ("new", "timeout", "recover", "expire")
_COUNTERS: Final = (
    "seen_bytes",
    "skipped_bytes",
    "forced_messages",
    "processed_messages",
    "processing_seconds",
    "errors",
)


def measure_scrape(bench: Bench, sites: int) -> dict[str, Any]:
    """Measure HTTP scrapes of the metrics of some sites with ten sampled streams each; seconds."""
    entries = [
        {"name": f"site{site}", "stream": f"NODES{n}", "target_stream": f"COPY{site}_{n}", **_SAMPLED}
        for site in range(sites)
        for n in range(STREAMS)
    ]
    settings = bench.settings(entries)
    _work(settings, 1)
    with MetricsServer(Exposition(settings), "127.0.0.1", 0) as url:
        text, _ = _scrape(url)
        quiet = [_scrape(url)[1] for _ in range(SCRAPES)]
        busy = []
        for step in range(SCRAPES):
            _work(settings, step + 2)
            busy.append(_scrape(url)[1])
    return {
        "streams": len(entries),
        "samples": sum(not line.startswith("#") for line in text.splitlines()),
        "quiet_seconds": round(statistics.median(quiet), 3),
        "quiet_max_seconds": round(max(quiet), 3),
        "busy_seconds": round(statistics.median(busy), 3),
        "busy_max_seconds": round(max(busy), 3),
    }


def _scrape(url: str) -> tuple[str, float]:
    started = time.monotonic()
    with urllib.request.urlopen(url) as answer:  # noqa: S310  our own
        text = answer.read().decode()
    return text, time.monotonic() - started


def _work(settings: Settings, step: int) -> None:
    """Write the status of every site, as a run does after each step."""
    counters = {name: {"": float(step)} for name in _COUNTERS}
    counters |= {name: dict.fromkeys(_EVENTS, float(step)) for name in ("advisories", "advisory_errors")}
    known = StreamStatus.from_json(
        {
            "created_ns": 1,
            "seen_messages": 1_000 * step,
            "copied_messages": 100 * step,
            "next_sequence": 1_000 * step + 1,
            "watermark_ns": step,
            "lag_messages": 3,
            "up": 1_000,
            "timeout": 3,
            "counters": counters,
        }
    )
    for site, streams in settings.sites.items():
        folder = settings.home / "sites" / site
        folder.mkdir(parents=True, exist_ok=True)
        write_status(folder, SiteStatus({entry.stream: known for entry in streams}))
