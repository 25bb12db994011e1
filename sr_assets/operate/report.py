"""What a run prints: a line for each stream, why it failed, and the exit code that follows.

Not here: what the run did (`stages`), its record in Dagster (`assets`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

from sr_assets.domain.errors import SrAssetsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dagster import DagsterEvent, ExecuteInProcessResult

    from sr_assets.settings import Entry, Kind, Settings


#: What is printed of an entry, by its kind: a verb and the column of `replication` that counts it.
_COUNTERS: Final[Mapping[Kind, Mapping[str, str]]] = {
    "stream": {"copied": "copied_messages", "skipped": "skipped_messages"},
    "feed": {"folded": "copied_messages", "rejected": "parked_messages"},
}


#: The checks whose verdict `run` prints: what only an operator can mend, and what the counters do not show.
_TOLD: Final = ("senders_found", "advisories_published")


def print_line(line: str) -> None:
    """Print a line on stdout."""
    print(line, flush=True)  # noqa: T201  the output of `run` and `up`


def print_error(line: str) -> None:
    """Print an error on stderr."""
    print(f"error: {line}", file=sys.stderr, flush=True)  # noqa: T201  as above


def print_warning(line: str) -> None:
    """Print a warning on stderr."""
    print(f"warning: {line}", file=sys.stderr, flush=True)  # noqa: T201  as above


def report_run(
    settings: Settings,
    entries: Sequence[Entry],
    result: ExecuteInProcessResult,
    before: Mapping[tuple[str, str], Mapping[str, Any]],
) -> int:
    """Print what a run did for each entry, by its counters before and after; returns the exit code.

    Counters start again from 0 with a new state. An entry that has not begun, or was not published anew, has no line.
    """
    after = published(settings)
    for entry in entries:
        row, old = after.get((entry.name, entry.stream)), before.get((entry.name, entry.stream), {})
        if row is None or row["source_created"] is None or row["as_of"] == old.get("as_of"):
            continue
        gains = (f"{verb} {_gain(row[column], old.get(column, 0))}" for verb, column in _COUNTERS[entry.kind].items())
        print_line(f"{entry.label}: {', '.join(gains)}, lag {row['lag_messages']}")
    for line in _warnings(entries, result):
        print_warning(line)
    if result.success:
        return 0
    for line in failures(result.all_events):
        print_error(line)
    return 2 if _misconfigured(result.all_events) else 1


def _warnings(entries: Sequence[Entry], result: ExecuteInProcessResult) -> list[str]:
    """Return a line for each check that did not pass and says something an operator has to do."""
    labels = {tuple(entry.asset_prefix): entry.label for entry in entries}
    return [
        f"{labels[tuple(verdict.asset_key.path[:2])]}: {verdict.description}"
        for verdict in result.get_asset_check_evaluations()
        if verdict.check_name in _TOLD and not verdict.passed and verdict.description
    ]


def _gain(now: int, before: int) -> int:
    return now - before if now >= before else now


def published(settings: Settings) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the table `replication` by name and stream; empty when nothing is published."""
    from sr_assets.adapters.published.reading import open_fleet, read_rows

    try:
        with open_fleet(settings.home) as connection:
            rows = read_rows(connection, "SELECT * FROM replication")
    except SrAssetsError:
        return {}
    streams = [dict(zip(rows.columns, values, strict=True)) for values in rows.values]
    return {(row["name"], row["stream"]): row for row in streams}


def failures(events: Sequence[DagsterEvent]) -> list[str]:
    """Return why a run failed, in lines without repeats: a step's own description, else the innermost error."""
    lines: list[str] = []
    for event in events:
        data = event.event_specific_data
        if (failure := getattr(data, "user_failure_data", None)) is not None and failure.description:
            lines += failure.description.splitlines()
        elif (error := getattr(data, "error", None)) is not None and (event.is_step_failure or not lines):
            lines.append(_innermost(error))
    return list(dict.fromkeys(line for line in lines if line.strip())) or [
        "the run failed; its log is in the Dagster UI"
    ]


def _misconfigured(events: Sequence[DagsterEvent]) -> bool:
    """Return whether a step failed because the configuration is wrong."""
    from sr_assets.resources import MISCONFIGURED

    failed = (getattr(event.event_specific_data, "user_failure_data", None) for event in events)
    marks = (failure.metadata.get(MISCONFIGURED) for failure in failed if failure is not None)
    return any(mark is not None and mark.value for mark in marks)


def _innermost(error: Any) -> str:
    while error.cause is not None:
        error = error.cause
    text = " ".join(error.message.split())
    return text.partition(": ")[2] or text
