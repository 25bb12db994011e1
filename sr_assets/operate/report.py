"""What a run prints: a line for each stream, why it failed, and the exit code that follows.

Not here: what the run did (`stages`), its record in Dagster (`assets`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.logs import print_problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dagster import DagsterEvent, ExecuteInProcessResult

    from sr_assets.settings import Entry, Kind


#: What is printed of an entry, by its kind: the asset that is recorded of it, and by verb what is recorded there.
_COUNTERS: Final[Mapping[Kind, tuple[str, Mapping[str, str]]]] = {
    "stream": ("replica", {"copied": "copied_messages", "skipped": "skipped_messages"}),
    "feed": ("advisory_feed", {"folded": "advisories", "rejected": "rejected"}),
}


#: The checks whose verdict `run` prints: what only an operator can mend, and what the counters do not show.
_PRINTED: Final = ("senders_found", "advisories_published")


def print_line(line: str) -> None:
    """Print a line on stdout."""
    print(line, flush=True)  # noqa: T201  the output of `run` and `up`


def print_error(line: str) -> None:
    """Print an error on stderr."""
    print_problem("error", line)


def print_warning(line: str) -> None:
    """Print a warning on stderr."""
    print_problem("warning", line)


def report_run(entries: Sequence[Entry], result: ExecuteInProcessResult) -> int:
    """Print what a run did for each entry, also before it failed; returns the exit code.

    An entry that has not begun has no line.
    """
    for entry in entries:
        noun, counters = _COUNTERS[entry.kind]
        recorded = _recorded(entry, noun, result.all_events)
        if recorded:
            counts = (f"{verb} {recorded[key]}" for verb, key in counters.items())
            print_line(f"{entry.label}: {', '.join(counts)}, lag {recorded['lag_messages']}")
    for line in _warnings(entries, result):
        print_warning(line)
    if result.success:
        return 0
    # Imported here: it imports Dagster, which a caller that only prints does not need.
    from sr_assets.automation.failures import failures

    for line in failures(result.all_events):
        print_error(line)
    return 2 if _misconfigured(result.all_events) else 1


def _warnings(entries: Sequence[Entry], result: ExecuteInProcessResult) -> list[str]:
    """Return a line for each check that did not pass and says something an operator has to do."""
    labels = {tuple(entry.asset_prefix): entry.label for entry in entries}
    return [
        f"{labels[tuple(verdict.asset_key.path[:2])]}: {verdict.description}"
        for verdict in result.get_asset_check_evaluations()
        if verdict.check_name in _PRINTED and not verdict.passed and verdict.description
    ]


def _recorded(entry: Entry, noun: str, events: Sequence[DagsterEvent]) -> Mapping[str, Any]:
    """Return the numbers that a run recorded of an entry's asset, or of its failure; empty when it did neither."""
    key = (*entry.asset_prefix, noun)
    numbers: Mapping[str, Any] = {}
    for event in events:
        if event.is_step_materialization and event.asset_key is not None and tuple(event.asset_key.path) == key:
            metadata = event.step_materialization_data.materialization.metadata
            numbers = {name: value.value for name, value in metadata.items()}
    for failure in _user_failures(events):
        numbers = failure.metadata[entry.label].value if entry.label in failure.metadata else numbers
    return numbers


def _user_failures(events: Sequence[DagsterEvent]) -> list[Any]:
    """Return the failures that steps raised themselves."""
    raised = (getattr(event.event_specific_data, "user_failure_data", None) for event in events)
    return [failure for failure in raised if failure is not None]


def _misconfigured(events: Sequence[DagsterEvent]) -> bool:
    """Return whether a step failed because the configuration is wrong."""
    from sr_assets.resources import MISCONFIGURED

    marks = (failure.metadata.get(MISCONFIGURED) for failure in _user_failures(events))
    return any(mark is not None and mark.value for mark in marks)
