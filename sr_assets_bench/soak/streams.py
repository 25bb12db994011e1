"""The streams of a soak: their names, their fleets and their rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sr_assets.embedded.emulator import Fleet
from sr_assets.embedded.fleet_plan import Churn, FleetPlan
from sr_assets.settings import parse_cluster
from sr_assets_bench.soak.steady import CLOCK, INTERVAL_SECONDS, LATEST, NODES
from sr_assets_tests.reference import SECOND, Rules, by_field
from sr_assets_tests.rig import SITE

if TYPE_CHECKING:
    from sr_assets.embedded.nats_server import NatsServer

PLAIN, SAMPLED, MIRROR, FEED, CENTRE = "PLAIN", "SAMPLED", "MIRROR", "FEED", "CENTRE"
_INTERVAL, _WARNING, _TRIGGER_BYTES = 6 * SECOND, 3 * SECOND, 500
#: The class of some nodes: its interval and its warning.
_PATIENT: Final = (10 * SECOND, 5 * SECOND)
_PATIENT_NODES: Final = "3"
_CHURN: Final = Churn(share=0.6, short_seconds=4.5, long_seconds=9.0)

#: The rules of the streams without and with sampling.
PLAIN_RULES: Final = Rules(SITE, SITE, PLAIN, _INTERVAL, _WARNING, "", sender=lambda _: None)
SAMPLED_RULES: Final = Rules(
    SITE,
    SITE,
    SAMPLED,
    _INTERVAL,
    _WARNING,
    "sender",
    by_field,
    trigger_bytes=_TRIGGER_BYTES,
    durations=lambda message: _PATIENT if _PATIENT_NODES in str(by_field(message)) else (_INTERVAL, _WARNING),
)
#: The keys of every entry, with small batches, so that faults interrupt much work; and those of a sampled one.
COMMON: Final[dict[str, Any]] = {"batch_messages": 1_000, "on_source_reset": "recopy"}
TRACKED: Final[dict[str, Any]] = {
    "inspect_field": "sender",
    "inspect_duration": f"{_INTERVAL // SECOND}s",
    "warn_duration": f"{_WARNING // SECOND}s",
    "size_trigger": _TRIGGER_BYTES,
    "classes": [
        {
            "name": "patient",
            "match": f"*{_PATIENT_NODES}*",
            "inspect_duration": f"{_PATIENT[0] // SECOND}s",
            "warn_duration": f"{_PATIENT[1] // SECOND}s",
        }
    ],
}
ADVISORY: Final[dict[str, Any]] = {"subject": f"{FEED}.%s.%v", "reliable": True}


def fleets_of(seed: int, source: NatsServer, slower: float = 1.0, *, steady: bool = False) -> list[Fleet]:
    """Return the publishers of each stream: up to 150 messages a second each, divided by `slower`."""
    plans = {
        PLAIN: FleetPlan(150, slower, seed, payload_bytes=1_000),
        SAMPLED: FleetPlan(75, 0.5 * slower, seed, _CHURN, payload_bytes=1_000),
        **{
            stream: FleetPlan(NODES, INTERVAL_SECONDS, seed, payload_bytes=1_000)
            for stream in (CLOCK, LATEST)
            if steady
        },
    }
    return [Fleet(plan, parse_cluster(source.url), f"{name}.%s") for name, plan in plans.items()]
