"""A day of a fleet on a compressed clock: its advisories compared with its plan.

A proxy reports the source's times to the run. A tick of the plan passes in a fraction of its time, and the next one begins
when all messages of the last one are stored: a busy machine makes the day longer, and no node silent.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.wire import Connection, Outgoing, Publisher, read_confirmed
from sr_assets.domain.positions import SECOND_NS, SequenceRange, parse_rfc3339_ns
from sr_assets.embedded.fleet_plan import FleetPlan
from sr_assets.embedded.plan_file import read_plan_file
from sr_assets_bench.rig import cluster_of
from sr_assets_bench.sizing import await_condition, replication_value
from sr_assets_bench.soak.wrong_clock import WrongClock
from sr_assets_bench.trickle import OurProcesses, following

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from sr_assets.embedded.nats_server import NatsServer
    from sr_assets_bench.rig import Bench

PLAN: Final = Path(__file__).parent / "day_plan.yaml"
_STREAM: Final = "DAY"
_ADVISED: Final = "ADVISED"
_INTERVAL_SECONDS: Final = 300.0
#: Silences are whole intervals. So neither duration is within a tick of one.
_WARNING_SECONDS: Final = 750
_EXPIRY_SECONDS: Final = 3_450
_TICK_SECONDS: Final = 30
_HOUR_SECONDS: Final = 3_600
#: Longer than the margin of a watermark.
_LEEWAY_SECONDS: Final = _TICK_SECONDS + 5

#: An advisory: its event and its time in seconds of the plan.
Event = tuple[str, float]


class CompressedClock(WrongClock):
    """A proxy in front of a server whose clock runs `speed` times as fast within each tick, and waits at its end."""

    def __init__(self, server: NatsServer, began_ns: int, speed: float) -> None:
        """Start the plan at `began_ns` of the reported time (unix ns)."""
        super().__init__(server)
        self._began_ns, self._speed = began_ns, speed
        self._ticks_ns = [time.time_ns()]

    def begin_tick(self) -> None:
        """Begin the next tick, once the current one has had its time."""
        next_ns = self._ticks_ns[-1] + int(_TICK_SECONDS * SECOND_NS / self._speed)
        while (left_ns := next_ns - time.time_ns()) > 0:
            time.sleep(left_ns / SECOND_NS)
        self._ticks_ns.append(time.time_ns())

    def _reported(self, real_ns: int) -> int:
        number = bisect_right(self._ticks_ns, real_ns) - 1
        if number < 0:
            return self._began_ns + real_ns - self._ticks_ns[0]
        within_ns = int((real_ns - self._ticks_ns[number]) * self._speed)
        return self._began_ns + number * _TICK_SECONDS * SECOND_NS + min(within_ns, _TICK_SECONDS * SECOND_NS - 1)


def measure_day(bench: Bench, nodes: int, hours: float = 24, speed: float = 200) -> dict[str, Any]:
    """Measure `sr-assets run --follow` while a fleet lives through the plan file `PLAN`, and compare the advisories.

    Each advisory must be one of the plan, with a time within a tick. Raises SystemExit for a difference.
    """
    churn, windows = read_plan_file(PLAN)
    plan = FleetPlan(nodes, _INTERVAL_SECONDS, churn=churn, payload_bytes=1_000, windows=windows)
    sent, seconds = _sent(plan, hours * _HOUR_SECONDS)
    bench.create(bench.source, _STREAM)
    bench.create(bench.source, _ADVISED)
    began_ns = time.time_ns() - int(seconds + _HOUR_SECONDS) * SECOND_NS
    started = time.monotonic()
    with CompressedClock(bench.source, began_ns, speed) as clock:
        times = {"inspect_duration": f"{_EXPIRY_SECONDS}s", "warn_duration": f"{_WARNING_SECONDS}s"}
        advisory = {"subject": f"{_ADVISED}.%s.%v", "reliable": True}
        entry = {"stream": _STREAM, "source_url": clock.url, "target_subject_prefix": "day", "inspect_field": "sender"}
        bench.settings([{**entry, **times, "advisory": advisory}])
        with following(bench, bench.home / "day.log", "--stream", _STREAM) as run:
            ours = OurProcesses(bench, run)
            messages = _live(bench, clock, sent, seconds)
            until = (began_ns / SECOND_NS) + seconds - _LEEWAY_SECONDS
            await_condition(
                lambda: replication_value(bench, _STREAM, "epoch(watermark)") >= until, "the end of the day"
            )
            used = ours.cpu_seconds()
    expected = expected_events(sent, seconds)
    announced = _announced(bench, began_ns)
    missing, false = compare_events(expected, announced)
    for text, listed in (("missing", missing), ("false", false)):
        if listed:
            raise SystemExit(f"{len(listed)} advisories of the day are {text}: {listed[:5]}")
    counts = Counter(event for events in announced.values() for event, _ in events)
    return {
        "nodes": nodes,
        "hours": round(seconds / _HOUR_SECONDS, 2),
        "messages": messages,
        "seconds": round(time.monotonic() - started, 1),
        "times_as_fast": round(seconds / (time.monotonic() - started)),
        "advisories": sum(counts.values()),
        **{f"advisories_{event}": counts[event] for event in ("new", "timeout", "recover", "expire")},
        "missing": len(missing),
        "false_alarms": len(false),
        "cpu_seconds": round(used, 1),
    }


def _sent(plan: FleetPlan, seconds: float) -> tuple[dict[str, list[float]], float]:
    """Return the times of each node's messages, and the end: the first tick in which no silence is near a duration."""
    sent: dict[str, list[float]] = defaultdict(list)
    for event in plan.events():
        if event.at_seconds >= seconds + 4 * _HOUR_SECONDS:
            break
        sent[event.sender].append(event.at_seconds)
    end = (seconds // _TICK_SECONDS) * _TICK_SECONDS
    while any(_is_near(times, end) for times in sent.values()):
        end += _TICK_SECONDS
    within = {node: [at for at in times if at < end] for node, times in sent.items()}
    return {node: times for node, times in within.items() if times}, end


def _is_near(times: list[float], end: float) -> bool:
    last = max((at for at in times if at < end), default=end)
    return any(abs(end - last - limit) <= 2 * _LEEWAY_SECONDS for limit in (_WARNING_SECONDS, _EXPIRY_SECONDS))


def _live(bench: Bench, clock: CompressedClock, sent: Mapping[str, Iterable[float]], seconds: float) -> int:
    """Publish the messages, tick by tick; return their number."""
    ticks: dict[int, list[str]] = defaultdict(list)
    for at, node in sorted((at, node) for node, times in sent.items() for at in times):
        ticks[int(at // _TICK_SECONDS)].append(node)
    number = 0
    with Connection(cluster_of(bench.source), "bench") as connection:
        for tick in range(int(seconds // _TICK_SECONDS)):
            if tick:
                clock.begin_tick()
            items = [
                Outgoing(number + index, f"{_STREAM}.{node}", b"", json.dumps({"sender": node}).encode())
                for index, node in enumerate(ticks[tick], 1)
            ]
            number += len(items)
            if refused := [ack.error for ack in Publisher(connection).publish_all(items) if ack.error]:
                raise SystemExit(refused[0])
    return number


def expected_events(sent: Mapping[str, list[float]], seconds: float) -> dict[str, list[Event]]:
    """Return each node's events of a plan that ends at `seconds`."""
    return {node: list(_events(times, seconds)) for node, times in sent.items()}


def _events(times: list[float], seconds: float) -> Iterator[Event]:
    yield "new", times[0]
    for last, following_at in pairwise([*times, seconds]):
        silence = following_at - last
        if silence > _WARNING_SECONDS:
            yield "timeout", last + _WARNING_SECONDS
        if silence > _EXPIRY_SECONDS:
            yield "expire", last + _EXPIRY_SECONDS
        if silence > _WARNING_SECONDS and following_at < seconds:
            yield ("new" if silence > _EXPIRY_SECONDS else "recover"), following_at


def compare_events(
    expected: Mapping[str, list[Event]], announced: Mapping[str, list[Event]]
) -> tuple[list[str], list[str]]:
    """Return the expected events that were not found and those found that were not expected, as text.

    Times may differ by a tick.
    """
    missing, false = list[str](), list[str]()
    for node in expected.keys() | announced.keys():
        wanted = list(expected.get(node, ()))
        for event, at in announced.get(node, ()):
            match = next((item for item in wanted if item[0] == event and abs(item[1] - at) <= _LEEWAY_SECONDS), None)
            if match is None:
                false.append(f"{node}: {event} at {at:.0f} s")
            else:
                wanted.remove(match)
        missing += [f"{node}: {event} at {at:.0f} s" for event, at in wanted]
    return missing, false


def _announced(bench: Bench, began_ns: int) -> dict[str, list[Event]]:
    """Return each node's advisories in their stream, with times in seconds of the plan."""
    announced: dict[str, list[Event]] = defaultdict(list)
    with Cluster(cluster_of(bench.source)) as cluster:
        stored = cluster.stream_info(_ADVISED)
    wanted = SequenceRange(1, stored.last_sequence + 1)
    with Connection(cluster_of(bench.source), "bench") as connection:
        for messages in read_confirmed(connection, _ADVISED, wanted, direct=True):
            for message in messages:
                advisory = json.loads(message.payload)
                at_ns = parse_rfc3339_ns(advisory["event_time"])
                announced[advisory["value"]].append((advisory["event"], (at_ns - began_ns) / SECOND_NS))
    return announced
