"""`report STREAM`: configuration, state, replicas, links, copies and partitions of one stream."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters.published import queries
from sr_assets.adapters.state.status_file import StreamStatus, read_status
from sr_assets.cli.render import Format, print_document, show
from sr_assets.domain.durations import duration
from sr_assets.domain.errors import ConfigurationError, RunError, did_you_mean
from sr_assets.domain.positions import SECOND_NS
from sr_assets.settings import Entry, FeedSettings, Settings

if TYPE_CHECKING:
    from sr_assets.stages.topology.survey import Survey

    Record = dict[str, Any]

#: Parts of a stream info that become properties, in this order; the links have a table of their own.
_PARTS: Final = ("config", "state", "cluster")
_LINKED: Final = ("mirror", "sources")
_NANOSECONDS: Final = ("max_age", "duplicate_window", "subject_delete_marker_ttl", "active")
_REFUSED: Final = ("impossible_hops", "forged_copies", "refused_metadata", "refused_senders")
_COUNTED: Final = ("next_sequence", "lag_messages", "copied_messages", "skipped_messages", "parked_messages", "queued")


def stream_details(survey: Survey, stream: str, cluster: str | None) -> list[Record]:
    """Return a stream's info on each cluster that lists it, or only on `cluster`.

    Raises ConfigurationError if no reachable cluster lists it.
    """
    listed = [each for each in survey.of.values() if each.lists(stream) and cluster in (None, each.name)]
    if not listed and not any(each.error for each in survey.of.values()):
        known = {name for each in survey.of.values() for name in each.streams}
        hint = did_you_mean(stream, sorted(known))
        raise ConfigurationError(
            f"stream {stream} is on none of the clusters {', '.join(survey.of)}; {hint}".rstrip("; ")
        )
    return [{"cluster": each.name, "stream": stream, **_known(each.answers[stream])} for each in listed]


def _known(answer: Mapping[str, Any]) -> Record:
    return {key: answer[key] for key in ("created", *_PARTS, *_LINKED) if answer.get(key)}


def stream_copies(settings: Settings, stream: str) -> list[Record]:
    """Return the progress of each entry that reads or writes a stream, from the last commit of its site."""
    return [
        {"name": entry.name, "stream": entry.stream, "target_stream": _target(entry), **_progress(settings, entry)}
        for entry in settings.entries
        if stream in (entry.stream, _target(entry))
    ]


def _target(entry: Entry) -> str | None:
    return None if isinstance(entry, FeedSettings) else entry.target_stream


def _status(settings: Settings, entry: Entry) -> StreamStatus | None:
    return read_status(settings.home / "sites" / entry.name).streams.get(entry.stream)


def _progress(settings: Settings, entry: Entry) -> Record:
    status = _status(settings, entry)
    return {key: status and getattr(status, key) for key in _COUNTED} | {"problem": status and status.last_error}


def stream_refusals(settings: Settings, stream: str) -> list[Record]:
    """Return how many values of publishers and other sites each entry of a stream refused, by kind.

    A feed's are those of `global_rejects`, which has a retention.
    """
    entries = [entry for entry in settings.entries if stream in (entry.stream, _target(entry))]
    refusals = [
        {"name": entry.name, "stream": entry.stream, "kind": kind, "count": int(sum(counts.values()))}
        for entry in entries
        if (status := _status(settings, entry)) is not None
        for kind, counts in status.counters.items()
        if kind in _REFUSED
    ]
    feeds = {entry.label: entry for entry in entries if isinstance(entry, FeedSettings)}
    if feeds:
        with contextlib.suppress(RunError):  # nothing is published yet
            rows = queries.ask(
                settings.home, "SELECT feed, reason, count(*) FROM global_rejects GROUP BY ALL ORDER BY ALL"
            )
            refusals += [
                {"name": feeds[label].name, "stream": feeds[label].stream, "kind": kind, "count": count}
                for label, kind, count in rows.values
                if label in feeds
            ]
    return [row for row in refusals if row["count"]]


def stream_partitions(settings: Settings, stream: str) -> list[Record]:
    """Return the configured partitions of each entry that reads or writes a stream; lanes without a run lack progress."""
    known: dict[tuple[Any, ...], Record] = {}
    with contextlib.suppress(RunError):  # nothing is published yet
        rows = queries.ask(settings.home, "SELECT * FROM replication_partitions")
        for row in (dict(zip(rows.columns, values, strict=True)) for values in rows.values):
            known[row["name"], row["stream"], row["partition"], row["subject"]] = row
    lanes = [
        (entry.name, entry.stream, number, subject)
        for entry in settings.streams
        if stream in (entry.stream, entry.target_stream)
        for number, subject in enumerate(entry.lanes)
    ]
    return [
        dict(zip(("name", "stream", "partition", "subject"), lane, strict=True))
        | {key: known.get(lane, {}).get(key) for key in ("next_sequence", "lag_messages", "watermark")}
        for lane in lanes
    ]


def print_details(form: Format, details: Sequence[Record], parts: Mapping[str, Sequence[Record]]) -> None:
    """Print the details of one stream on each cluster, then its other parts, such as links and copies."""
    if form == "json":
        print_document({"streams": list(details), **parts})
        return
    tables = [(f"Stream {each['stream']} on {each['cluster']}", _properties(each)) for each in details]
    tables += [(name.capitalize(), list(records)) for name, records in parts.items()]
    for index, (title, records) in enumerate(table for table in tables if table[1]):
        sys.stdout.write("\n" if index else "")
        rows = [tuple(record.values()) for record in records]
        show(tuple(records[0]), rows, form, title=title, first=tuple(records[0])[:2])


def _properties(details: Record) -> list[Record]:
    return [
        {"property": name, "value": value}
        for part in ("created", "replication", *_PARTS)
        if part in details
        for name, value in _flat(part, details[part])
    ]


def _flat(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the values of a nested block by their dotted names; empty ones are left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name not in _PARTS else key, inner)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, inner in enumerate(value, 1):
            yield from _flat(f"{name}.{inner.get('name', index)}", {k: v for k, v in inner.items() if k != "name"})
    elif name.rpartition(".")[2] in _NANOSECONDS and isinstance(value, int):
        yield name, duration(value / SECOND_NS) if value else "unlimited"
    elif value not in (None, "", [], {}):
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else value
