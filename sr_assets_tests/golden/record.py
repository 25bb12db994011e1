"""Record a golden home next to this module: `make golden`.

It takes more than a minute, because no clock is moved: the home is what runs leave on a real machine. Streams of the site:

- `REG`: tracked nodes that are up, silent, retired, back, under maintenance, retired by hand; advisories; a compacted history
- `FLEET`: nodes under an outage guard, one of them flapping; no stream takes their advisories
- `ORDERS`: a plain stream with gaps, a parked message and heartbeats; its target is full in the middle of a batch
- `HELD`: tracked and paused, with a queue and a parked message that is to be copied again
- `LANES`: a plain stream in two partitions
- `ADV`: the advisories, which the centre reads from the target
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import duckdb
import pytest

from sr_assets.adapters import control, crash_points
from sr_assets.adapters.state.operator_settings import added_windows
from sr_assets.cli import run_command
from sr_assets.domain.errors import RunError
from sr_assets_tests.golden import CENTRE, FOLDER, SITES, Facts, Golden, Posted, pack
from sr_assets_tests.rig import IN_PROCESS, SITE

#: The same on all machines, because the home names it.
_PLACE: Final = Path("/tmp/sr-assets-golden")
#: Longer than the `warn_duration` and the `inspect_duration` of nodes that fall silent, and the watermark's margin.
_SILENCE_NS: Final = 3_500_000_000
_LONG: Final = "100Y"
_BRIEF: Final = {"name": "brief", "field": "kind", "value": "brief", "warn_duration": "1s", "inspect_duration": "2s"}
_QUIET: Final = {"name": "quiet", "match": ["quiet*", "maint*"], "warn_duration": "1s"}
_FLEET: Final = [f"f{number}" for number in range(4)]
_TOO_LARGE: Final = "x" * 3_000
_ROOM: Final = 4_096
_LINKS: Final = {"name": SITE, "source_url": "@SOURCE@", "target_url": "@TARGET@"}
_STREAMS: Final[list[dict[str, Any]]] = [
    {
        "stream": "REG",
        "inspect_field": "sender",
        "inspect_force_field": "force",
        "inspect_duration": {"data": "ops/interval"},
        "classes": [_BRIEF, _QUIET],
        "advisory": {"subject": "adv.%s.%v", "reliable": True},
    },
    {
        "stream": "FLEET",
        "inspect_header": "Node",
        "inspect_duration": "30d",
        "warn_duration": "2s",
        "outage_guard": {"min_nodes": 3, "quiet": "1s"},
        "flapping": {"transitions": 2, "within": "1h"},
        "recover_after": "1s",
        "advisory": {"subject": "late.%s.%v", "reliable": True},
    },
    {"stream": "ORDERS"},
    {"stream": "HELD", "inspect_field": "sender", "inspect_force_field": "force", "inspect_duration": "30d"},
    {"stream": "LANES", "partitions": {"count": 2, "filter": "LANES.{p}.>"}},
    {"stream": "ADV", "target_stream": "ADVISORIES"},
]
_DOCUMENT: Final[dict[str, Any]] = {
    "name": SITE,
    "state_store": "@HOME@",
    "spark": IN_PROCESS,
    "streams": [_LINKS | stream for stream in _STREAMS],
    "feeds": [{"name": CENTRE, "stream": "ADVISORIES", "url": "@TARGET@", "retired_retention": _LONG}],
    "data": {"ops": {"type": "kv", "url": "@SOURCE@", "bucket": "OPS"}},
    "heartbeats": {"url": "@SOURCE@", "interval": "1h", "subjects": [{"subject": "ORDERS.beat"}]},
    "notify": [
        {"name": "pager", "command": ["sh", "-c", "cat >> @HOME@/../notified"], "events": ["timeout", "expire"]}
    ],
    "checkpoint": {"interval": _LONG, "cluster": "target"},
    **{key: {"retention": _LONG} for key in ("snapshots", "advisories", "gaps", "availability", "inventory")},
}


def node(name: str, **more: Any) -> Posted:
    """Return a message of a node; its subject, headers and payload."""
    return ("m", f"NATS/1.0\r\nNode: {name}\r\n\r\n", json.dumps({"sender": name, **more}))


def text(body: str, subject: str = "m") -> Posted:
    """Return a message without headers."""
    return (subject, "", body)


def command(rig: Golden, *arguments: str) -> None:
    """Run `sr-assets`."""
    code = run_command(["--config", str(rig.configuration), *arguments])
    assert code == 0, arguments


def prepare(rig: Golden) -> None:
    """Create the streams, and targets of little room."""
    (rig.folder / "configuration.json").write_text(json.dumps(_DOCUMENT, indent=1))
    rig.create("KV_OPS", subjects=["$KV.OPS.>"], max_msgs_per_subject=5, allow_rollup_hdrs=True)
    for name in ("REG", "FLEET", "ORDERS", "HELD", "LANES"):
        rig.create(name)
    rig.create("ADV", subjects=["adv.>", "sr_assets.>"])
    rig.create("HELD", rig.target, max_msg_size=_ROOM // 2)
    rig.create("ORDERS", rig.target, max_msg_size=_ROOM // 2, max_msgs=6, discard="new")
    rig.send({"$KV.OPS": [text("30d", "interval")]})


def fill(rig: Golden) -> None:
    """Bring the home into every state that a site can have."""
    rig.send(
        {
            "REG": [node(f"up{number % 3}", force=True, number=number) for number in range(24)],
            "FLEET": [node("flap")],
            "ORDERS": [text("1"), text("2"), text("3")],
            "HELD": [node("h1"), node("h2", pad=_TOO_LARGE)],
            "LANES": [text(str(number), f"{number % 2}.n{number}") for number in range(6)],
        }
    )
    rig.api("STREAM.MSG.DELETE.ORDERS", {"seq": 2})
    document = json.loads(json.dumps(_DOCUMENT["streams"]))
    document[0]["batch_messages"] = 1
    rig.drain(streams=document)
    rig.send(
        {"REG": [node("gone", kind="brief"), node("back", kind="brief"), node("quiet1"), node("hand1"), node("hand2")]}
    )
    rig.drain()
    rig.await_clock("REG", rig.clock_ns("REG") + _SILENCE_NS)
    command(rig, "maintenance", "add", "--match", "maint*", "--for", "12h", "--reason", "new switches")
    rig.send({"REG": [node("back"), node("maint1")], "FLEET": [node("flap")]})
    rig.drain(advisories={"retention": "1s"})
    command(rig, "pause", "--stream", "HELD")
    command(rig, "retry-parked", "--stream", "HELD")
    for action, name in (("retire", "hand1"), ("retire", "hand2"), ("unretire", "hand2")):
        command(rig, action, name)
    beat = "NATS/1.0\r\nChoria-SR-Subject: ORDERS.beat\r\nChoria-SR-Originator: host1\r\n\r\n"
    rig.send(
        {
            "REG": [node("up0"), node("lost"), node("up0")],
            "FLEET": [node(name) for name in _FLEET],
            "HELD": [node("h1", force=True), node("h3")],
            "ORDERS": [("beat", beat, str(int(time.time()))), text(_TOO_LARGE)],
        }
    )
    rig.api("STREAM.MSG.DELETE.REG", {"seq": rig.info("REG").last_sequence - 1})
    rig.drain()
    rig.send({"adv": [text("no advisory", "strange")]})
    rig.await_clock("REG", rig.clock_ns("REG") + _SILENCE_NS)
    rig.drain()
    control.change(rig.home, "DELETE FROM due_work")
    command(rig, "run", "--once")
    command(rig, "checkpoint", "--site", SITE)


def interrupt(rig: Golden) -> None:
    """Leave a batch and files of the history open, and sightings that the watermark has not reached."""
    rig.send({"ORDERS": [text(str(number)) for number in range(5, 10)]})
    failures = [report.failure for report in rig.run().values() if report.failure]
    assert len(failures) == 1, failures
    rig.drain(CENTRE)

    def stop(point: crash_points.Point) -> None:
        if point == crash_points.Point.PLACING_SNAPSHOTS:
            raise RunError("stopped")

    rig.send({"REG": [node("up1", force=True)], "FLEET": [node("f0")]})
    crash_points.hook = stop
    rig.run(streams=[entry for entry in _DOCUMENT["streams"] if entry["stream"] != "ORDERS"])
    crash_points.hook = None


def by_stream(state: duckdb.DuckDBPyConnection, query: str) -> dict[str, list[int]]:
    """Return the sequences of a query's rows by stream."""
    sequences: dict[str, list[int]] = {}
    for stream, sequence in state.execute(query).fetchall():
        sequences.setdefault(stream, []).append(sequence)
    return sequences


def facts_of(rig: Golden) -> Facts:
    """Return the facts of the home, and the end of all obstacles."""
    tables = rig.tables()
    with duckdb.connect(str(rig.home / "sites" / SITE / "state.duckdb"), read_only=True) as state:
        queued = by_stream(state, "SELECT stream, sequence FROM copy_queue")
        resent = by_stream(state, "SELECT stream, unnest(range(first, next)) FROM resends")
    announcing = {entry["stream"] for entry in _STREAMS if "advisory" in entry}
    outbox = [row for row in tables["node_advisories"] if row["announced_at"] and not row["published_at"]]
    return {
        "recorded_ns": time.time_ns(),
        "tables": tables,
        "copies": rig.copied(),
        "queued": queued,
        "resent": resent,
        "outbox": [row["event_id"] for row in outbox if row["stream"] in announcing],
        "notified": rig.notified(),
        "windows": [window.id for window in added_windows(rig.home / "sites" / SITE)],
        "advisory_streams": ["ADV", "LATE"],
        "steady_streams": ["REG", "HELD"],
        "commands": [["resume", "--stream", "HELD"]],
        "streams": [
            ("source", "LATE", {"subjects": ["late.>"]}),
            ("target", "HELD", {"max_msg_size": -1}),
            ("target", "ORDERS", {"max_msgs": -1}),
        ],
        "messages": {
            "REG": [node("up0", force=True), node("gone", force=True), node("fresh")],
            "FLEET": [node("f9")],
            "ORDERS": [text("last")],
            "HELD": [node("h1", force=True)],
            "LANES": [text("last", "0.n0"), text("last", "1.n1")],
        },
    }


def require_all(rig: Golden) -> None:
    """Refuse a home without a row in one of the tables of its states."""
    filled, tables = set(), set()
    for site in SITES:
        with duckdb.connect(str(rig.home / "sites" / site / "state.duckdb"), read_only=True) as state:
            for (table,) in state.execute("SELECT table_name FROM duckdb_tables()").fetchall():
                tables.add(table)
                if state.execute(f"FROM {table} LIMIT 1").fetchall():
                    filled.add(table)
    assert filled == tables, f"no row in {tables - filled}"


def require_lasting(rig: Golden) -> None:
    """Refuse a stream from which its server deletes messages as time passes."""
    for server in (rig.source, rig.target):
        for stream in rig.api("STREAM.LIST", server=server)["streams"]:
            assert not stream["config"].get("max_age"), stream["config"]["name"]


def require_anonymous(rig: Golden, host: str) -> None:
    """Refuse an archive that names this machine, its user's home or this folder."""
    # A short name occurs in any file.
    names = {name for name in (host, str(Path.home()), str(FOLDER.parent.parent)) if len(name) > 4}
    for file in rig.folder.rglob("*"):
        content = file.read_bytes() if file.is_file() and "dagster" not in file.parts else b""
        assert not [name for name in names if name.encode() in content], file


def main() -> None:
    """Record a home as `home-VERSION-DATE.tar.xz`, or under the name of the first argument."""
    name = next(iter(sys.argv[1:]), f"home-{version('sr-assets')}-{datetime.now(UTC):%F}")
    shutil.rmtree(_PLACE, ignore_errors=True)
    os.environ["DAGSTER_HOME"] = str(_PLACE / "home" / "dagster")
    host = socket.gethostname()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: "recorder")
        patch.setattr(getpass, "getuser", lambda: "operator")
        rig = Golden.at(_PLACE)
        with rig.source, rig.target:
            prepare(rig)
            fill(rig)
            interrupt(rig)
            require_lasting(rig)
            command(rig, "checkpoint", "--site", SITE, "-o", str(rig.folder / "checkpoint"))
            (rig.folder / "facts.json").write_text(json.dumps(facts_of(rig), indent=1))
    require_all(rig)
    require_anonymous(rig, host)
    archive = FOLDER / f"{name}.tar.xz"
    pack(rig.folder, archive)
    sys.stdout.write(f"{archive}: {archive.stat().st_size:,} bytes\n")


if __name__ == "__main__":
    main()
