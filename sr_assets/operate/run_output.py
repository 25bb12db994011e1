"""The printed result of a run: a line for each stream, the reasons of failures, and the exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from sr_assets.adapters.logs import print_error, print_warning
from sr_assets.dagster_internals import check_evaluations, failure_of, materialization_of
from sr_assets.domain.foreign_text import visible
from sr_assets.settings import Entry, Kind

if TYPE_CHECKING:
    from dagster import DagsterEvent, ExecuteInProcessResult, Failure

#: By kind of entry: the asset whose metadata is printed, and the metadata key of each printed verb.
_COUNTERS: Final[Mapping[Kind, tuple[str, Mapping[str, str]]]] = {
    "stream": ("replica", {"copied": "copied_messages", "skipped": "skipped_messages"}),
    "feed": ("advisory_feed", {"folded": "advisories", "rejected": "rejected"}),
}

#: The checks that `run` prints if they fail: problems that only an operator can solve and no counter shows.
_PRINTED: Final = ("senders_found", "advisories_published")


def print_line(line: str) -> None:
    # One write: a line of another thread may follow.
    print(f"{visible(line)}\n", end="", flush=True)  # noqa: T201  the output of `run` and `up`


def report_idle(entries: Sequence[Entry]) -> None:
    """Print a line without work for each entry."""
    for entry in entries:
        _, counters = _COUNTERS[entry.kind]
        print_line(f"{entry.label}: {', '.join(f'{verb} 0' for verb in counters)}, lag 0")


def report_run(entries: Sequence[Entry], result: ExecuteInProcessResult) -> int:
    """Print the work done for each entry, including failed ones, and return the exit code.

    An entry without recorded work has no line.
    """
    for entry in entries:
        noun, counters = _COUNTERS[entry.kind]
        recorded = _recorded(entry, noun, result.all_events)
        if recorded:
            counts = {verb: recorded[key] for verb, key in counters.items()}
            has_failed = any(entry.label in failure.metadata for failure in _failures(result.all_events))
            # A failed stream without any work may not have reached its source.
            lag = "unknown" if has_failed and not any(counts.values()) else recorded["lag_messages"]
            print_line(f"{entry.label}: {', '.join(f'{verb} {count}' for verb, count in counts.items())}, lag {lag}")
    for line in _warnings(entries, result):
        print_warning(line)
    if result.success:
        return 0
    # Imported late: it imports Dagster, which callers that only print do not need.
    from sr_assets.automation.failures import failures

    for line in failures(result.all_events):
        print_error(line)
    return 2 if _misconfigured(result.all_events) else 1


def _warnings(entries: Sequence[Entry], result: ExecuteInProcessResult) -> list[str]:
    """Return a line for each failed check that an operator must act on."""
    labels = {tuple(entry.asset_prefix): entry.label for entry in entries}
    return [
        f"{labels[tuple(check.asset_key.path[-3:-1])]}: {check.description}"
        for check in check_evaluations(result)
        if check.check_name in _PRINTED and not check.passed and check.description
    ]


def _recorded(entry: Entry, noun: str, events: Sequence[DagsterEvent]) -> Mapping[str, Any]:
    """Return the numbers recorded in an entry's materialization or failure, or an empty mapping."""
    key = [*entry.asset_prefix, noun]
    numbers: Mapping[str, Any] = {}
    for event in events:
        if (recorded := materialization_of(event)) is not None and recorded.asset_key.path[-3:] == key:
            numbers = {name: value.value for name, value in recorded.metadata.items()}
    for failure in _failures(events):
        if entry.label in failure.metadata:
            numbers = cast(Mapping[str, Any], failure.metadata[entry.label].value)
    return numbers


def _failures(events: Sequence[DagsterEvent]) -> list[Failure]:
    """Return the `Failure`s that steps raised."""
    return [failure for event in events if (failure := failure_of(event)) is not None]


def _misconfigured(events: Sequence[DagsterEvent]) -> bool:
    """Return whether a step failed because of the configuration."""
    from sr_assets.resources import MISCONFIGURED

    marks = (failure.metadata.get(MISCONFIGURED) for failure in _failures(events))
    return any(mark is not None and mark.value for mark in marks)
