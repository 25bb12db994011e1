"""The command `report`: the current state of every stream and link, as tables or as a graph."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from sr_assets.adapters.logs import print_error
from sr_assets.cli.base import FILE, cli
from sr_assets.cli.completing import complete_stream
from sr_assets.cli.render import Format, print_document, show
from sr_assets.cli.watching import watchable
from sr_assets.domain.errors import ConfigurationError, RunError

if TYPE_CHECKING:
    from sr_assets.settings import Settings
    from sr_assets.stages.topology.link_rows import Report

    Record = dict[str, Any]

#: Columns of the tables; JSON and CSV have all columns.
_STREAMS: Final = (
    "cluster",
    "domain",
    "stream",
    "storage",
    "placement",
    "consumers",
    "messages",
    "bytes",
    "lost",
    "deleted",
    "api_level",
    "peers",
    "replication",
)
_LINKS: Final = (
    "stream",
    "kind",
    "origin_stream",
    "cluster",
    "origin_cluster",
    "api_prefix",
    "copies",
    "sampling",
    "active_seconds",
    "lag_messages",
    "lag_seconds",
    "error",
)
_FIRST: Final = ("stream", "kind", "origin_stream", "active_seconds", "lag_messages", "error")
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


@cli.command(epilog="Example: sr-assets report london/NODES")
@click.argument("stream", required=False, shell_complete=complete_stream)
@click.option("--cluster", metavar="C", help="Show only this cluster, by its name in the report.")
@click.option("--leaders", is_flag=True, help="Add the number of streams that each server leads.")
@click.option("--raw", is_flag=True, help="Print bytes and seconds as plain numbers.")
@click.option("--sort", metavar="KEY", help="Sort by a column: numbers descending, text ascending.")
@click.option(
    "--dot",
    type=FILE,
    help="Write the links to this file as a graph for graphviz.",
)
@watchable
def report(
    settings: Settings,
    stream: str | None,
    cluster: str | None,
    leaders: bool,
    raw: bool,
    sort: str | None,
    dot: Path | None,
    form: Format,
) -> int:
    """Query all clusters for every stream and link: native mirrors and sources, replicas, feeds.

    With STREAM, print the configuration, state, replicas, links, copies, refusals and partitions of that stream.

    Exit code 1 if a cluster is unreachable.
    """
    from sr_assets.cli.stream_report import (
        print_details,
        stream_copies,
        stream_details,
        stream_partitions,
        stream_refusals,
    )
    from sr_assets.stages.topology.link_rows import link_record, make_report
    from sr_assets.stages.topology.survey import Survey

    with Survey(settings, "sr-assets report") as survey:
        made = make_report(settings, survey.refresh())
        if cluster is not None and cluster not in survey.of:
            raise ConfigurationError(f"--cluster {cluster} is unknown; choose one of: {', '.join(survey.of)}")
        details = None if stream is None else stream_details(survey, stream, cluster)
    for each in details or ():
        each["replication"] = made.replication.get((each["cluster"], each["stream"]))
    if stream is None or details is None:
        _print_report(made, cluster, form, leaders=leaders, raw=raw, sort=sort, dot=dot)
    else:
        links = [link_record(link) for link in made.links if stream in (link.stream, link.origin_stream)]
        parts = {
            "links": links,
            "copies": stream_copies(settings, stream),
            "refused": stream_refusals(settings, stream),
            "partitions": stream_partitions(settings, stream),
        }
        print_details(form, details, parts)
    for name, error in made.unreachable.items():
        print_error(f"cluster {name}: {error}")
    return int(bool(made.unreachable))


def _print_report(
    made: Report,
    cluster: str | None,
    form: Format,
    *,
    leaders: bool,
    raw: bool,
    sort: str | None,
    dot: Path | None,
) -> None:
    from sr_assets.stages.topology.link_rows import link_record, stream_record

    streams = [
        stream_record(row) | {"replication": made.replication.get((row.cluster, row.stream or ""))}
        for row in made.streams
        if cluster in (None, row.cluster)
    ]
    links = [link_record(link) for link in made.links if cluster in (None, link.cluster, link.origin_cluster)]
    if dot is not None:
        _write_graph(dot, made, cluster)
    _sort(sort, streams, links)
    counted = _leaders(streams) if leaders else None
    if form in ("json", "csv"):
        _print_records(form, streams, links, counted)
    else:
        _print_tables(form, streams, links, counted, raw=raw)


def _print_records(
    form: Format, streams: Sequence[Record], links: Sequence[Record], leaders: Sequence[Record] | None
) -> None:
    tables = {"streams": streams, "links": links} | ({} if leaders is None else {"leaders": leaders})
    if form == "json":
        print_document(tables)
        return
    columns = {"streams": _columns("stream"), "links": _columns("link"), "leaders": ("server", "cluster", "streams")}
    for index, (name, records) in enumerate(tables.items()):
        sys.stdout.write("\n" if index else "")
        show(columns[name], [tuple(record.values()) for record in records], form)


def _columns(table: str) -> tuple[str, ...]:
    from sr_assets.stages.topology.link_rows import LINK_COLUMNS, STREAM_COLUMNS

    return (*STREAM_COLUMNS, "replication") if table == "stream" else LINK_COLUMNS


def _print_tables(
    form: Format, streams: Sequence[Record], links: Sequence[Record], leaders: Sequence[Record] | None, *, raw: bool
) -> None:
    reachable = [stream for stream in streams if stream["stream"] is not None]
    shown = [
        tuple(stream[column] if raw else _with_unit(column, stream[column]) for column in _STREAMS)
        for stream in reachable
    ]
    shown += [(row["cluster"], row["domain"], "unreachable", *[None] * 10) for row in streams if row["stream"] is None]
    columns = ["replicas" if column == "peers" else column for column in _STREAMS]
    show(
        columns,
        shown,
        form,
        title="Stream Report",
        first=("cluster", "stream", "messages", "bytes", "replication"),
        alarmed=_unreachable,
    )
    rows = [tuple(_link_cell(column, link, raw=raw) for column in _LINKS) for link in links]
    if rows:
        sys.stdout.write("\n")
        dead = [link["dead"] or link["error"] for link in links]
        alarms = {id(row): bool(alarm) for row, alarm in zip(rows, dead, strict=True)}
        columns = ["filters and transforms" if column == "copies" else column for column in _LINKS]
        show(columns, rows, form, title="Replication Report", first=_FIRST, alarmed=lambda row: alarms[id(row)])
    if leaders is not None:
        sys.stdout.write("\n")
        total = sum(row["streams"] for row in leaders)
        shares = [(*row.values(), f"{100 * row['streams'] / total:.0f} %") for row in leaders]
        show(("server", "cluster", "streams", "distribution"), shares, form, title="RAFT Leader Report")


def _unreachable(row: Sequence[Any]) -> bool:
    return row[3] is None


def _link_cell(column: str, link: Mapping[str, Any], *, raw: bool) -> object:
    if column == "copies":
        return "; ".join(filter(None, [link["filter"], link["transforms"]])) or None
    value = link[column]
    if column == "active_seconds" and value is None:
        return "never"
    if column == "lag_messages" and value is None:
        return "unknown"
    if column == "kind":
        return str(value).capitalize()
    # Text is not formatted as a duration.
    return f"{value:g}" if raw and column.endswith("_seconds") and value is not None else value


def _with_unit(column: str, value: object) -> object:
    if column != "bytes" or not isinstance(value, (int, float)):
        return value
    amount, unit = float(value), 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.0f} {_UNITS[unit]}" if unit == 0 else f"{amount:.1f} {_UNITS[unit]}"


def _leaders(streams: Sequence[Record]) -> list[Record]:
    led = Counter((row["leader"], row["cluster"]) for row in streams if row["leader"])
    return [
        {"server": server, "cluster": cluster, "streams": count} for (server, cluster), count in sorted(led.items())
    ]


def _sort(key: str | None, *tables: list[Record]) -> None:
    """Sort the tables that have a column: numbers descending, text ascending, NULL last."""
    if key is None:
        return
    columns = {*_columns("stream"), *_columns("link")}
    if key not in columns:
        raise ConfigurationError(f"--sort {key} is not a column; choose one of: {', '.join(sorted(columns))}")
    for table in tables:
        if table and key in table[0]:
            table.sort(key=lambda record: _sort_key(record[key]))


def _sort_key(value: object) -> tuple[bool, Any]:
    if value is None:
        return True, 0
    return False, -value if isinstance(value, (int, float)) else value


def _write_graph(file: Path, made: Report, cluster: str | None) -> None:
    from sr_assets.adapters.private import write_private
    from sr_assets.domain.topology.graph import dot, graph_of

    streams = [
        (row.cluster, row.domain, row.stream)
        for row in made.streams
        if row.stream is not None and cluster in (None, row.cluster)
    ]
    links = [link for link in made.links if cluster in (None, link.cluster, link.origin_cluster)]
    try:
        write_private(file, dot(graph_of(streams, links)))
    except OSError as error:
        raise RunError(f"--dot {file}: cannot be written: {error.strerror}") from None
