"""Output of several tables: one node, and the summary of all sites with its sums."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from sr_assets.cli.render import Format, age_text, print_document, print_note, show

if TYPE_CHECKING:
    from sr_assets.adapters.published.reading import Rows

#: The columns that a narrow window keeps, and the summed columns of the summary.
_SUMMARY: Final = ("replicator", "name", "stream", "observer", "outage", "up", "timeout", "retired")
_SUMMED: Final = ("up", "timeout", "retired", "new_24h")
_NODE: Final = ("name", "status", "age_seconds")
_HISTORY: Final = ("event", "event_time", "name", "age_seconds")


def print_node(tables: Iterable[tuple[str, "Rows"]], messages: "Rows", form: Format) -> None:
    """Print one node's tables under their titles, then its newest message of each stream."""
    for title, rows in tables:
        show(rows.columns, rows.values, form, title=title, first=_NODE if "status" in rows.columns else _HISTORY)
        sys.stdout.write("\n")
    for site, stream, stored_at, subject, payload_bytes, payload, metadata in messages.values:
        print_note(f"{site}/{stream}: {payload_bytes} bytes on {subject}, stored {stored_at:%Y-%m-%d %H:%M:%S}")
        print_document(metadata if metadata is not None else payload)


def print_summary(rows: "Rows", form: Format) -> None:
    """Print the summary with blind and dark sites in red, its sums, and the meaning of `blind` and `unwatched`."""
    records = [dict(zip(rows.columns, row, strict=True)) for row in rows.values]
    observer, outage = rows.columns.index("observer"), rows.columns.index("outage")
    show(rows.columns, rows.values, form, first=_SUMMARY, alarmed=lambda row: row[observer] == "blind" or row[outage])
    sites = len({(record["replicator"], record["name"]) for record in records})
    blind = sum(record["observer"] == "blind" for record in records)
    up, silent, retired, new = (sum(record[column] for record in records) for column in _SUMMED)
    as_of = max(record["as_of"] for record in records)
    counted = f"{up} up, {silent} silent, {retired} retired, {new} new in 24 h"
    print_note(f"{sites} sites ({blind} blind): {counted}; {age_text(as_of)}")
    for record in records:
        if record["outage"]:
            where = f"{record['name'] or record['replicator']}/{record['stream']}"
            held = f"{record['held']} nodes" if record["held"] else "its nodes"
            print_note(f"{where}: {record['outage']}: the announcements of {held} are held")
        if record["flapping"]:
            print_note(f"{record['name']}/{record['stream']}: {record['flapping']} nodes flap")
    if blind:
        print_note("blind: heartbeat overdue; node states may be stale")
    if any(record["observer"] == "unwatched" for record in records):
        print_note("unwatched: never sent a heartbeat; node states may be stale without notice")
