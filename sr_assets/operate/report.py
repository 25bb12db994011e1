"""What a run has to say: a line for each stream, why it failed, and the exit code that follows."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from sr_assets.domain.errors import SrAssetsError
from sr_assets.settings import FeedSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dagster import DagsterEvent, ExecuteInProcessResult

    from sr_assets.settings import Entry, Settings


def say(line: str) -> None:
    """Say a line on stdout."""
    print(line, flush=True)  # noqa: T201  what `run` and `up` have to say


def complain(line: str) -> None:
    """Say on stderr what went wrong."""
    print(f"error: {line}", file=sys.stderr, flush=True)  # noqa: T201  as above


def report_run(
    settings: Settings,
    streams: Sequence[Entry],
    result: ExecuteInProcessResult,
    before: Mapping[tuple[str, str], Mapping[str, Any]],
) -> int:
    """Say what a run did for each stream: what its counters gained, which begin anew with a new state."""
    after = published(settings)
    for stream in streams:
        row, old = after.get((stream.name, stream.stream)), before.get((stream.name, stream.stream), {})
        begun = row is not None and row["source_created"] is not None
        if row is not None and begun and row["as_of"] != old.get("as_of"):
            feed = isinstance(stream, FeedSettings)
            counters = ("copied_messages", "parked_messages" if feed else "skipped_messages")
            taken, left = (
                row[column] - old[column] if old and row[column] >= old[column] else row[column] for column in counters
            )
            did = f"folded {taken}, kept apart {left}" if feed else f"copied {taken}, skipped {left}"
            say(f"{stream.label}: {did}, lag {row['lag_messages']}")
    if result.success:
        return 0
    for line in failures(result.all_events):
        complain(line)
    return 2 if _misconfigured(result.all_events) else 1


def published(settings: Settings) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the table `replication` by name and stream; empty when nothing is published."""
    from sr_assets.adapters.published.reading import open_fleet, read_rows

    try:
        with open_fleet(settings.home) as connection:
            rows = read_rows(connection, "SELECT * FROM replication")
    except SrAssetsError:
        return {}
    found = [dict(zip(rows.columns, values, strict=True)) for values in rows.values]
    return {(row["name"], row["stream"]): row for row in found}


def failures(events: Sequence[DagsterEvent]) -> list[str]:
    """Return why a run failed, in lines without repeats: a step's own words, else the error under it."""
    lines: list[str] = []
    for event in events:
        data = event.event_specific_data
        if (said := getattr(data, "user_failure_data", None)) is not None and said.description:
            lines += said.description.splitlines()
        elif (error := getattr(data, "error", None)) is not None and (event.is_step_failure or not lines):
            lines.append(_innermost(error))
    return list(dict.fromkeys(line for line in lines if line.strip())) or [
        "the run failed; its log is in the Dagster UI"
    ]


def _misconfigured(events: Sequence[DagsterEvent]) -> bool:
    """Tell whether a step said that its configuration is wrong."""
    from sr_assets.resources import MISCONFIGURED

    said = (getattr(event.event_specific_data, "user_failure_data", None) for event in events)
    marks = (failure.metadata.get(MISCONFIGURED) for failure in said if failure is not None)
    return any(mark is not None and mark.value for mark in marks)


def _innermost(error: Any) -> str:
    while error.cause is not None:
        error = error.cause
    text = " ".join(error.message.split())
    return text.partition(": ")[2] or text
