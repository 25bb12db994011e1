"""How rows are shown: a table for people, JSON and CSV for programs; the same for every command.

JSON is one array of objects, or one object a line; CSV has a header. Times are ISO 8601 in UTC in both. To a pipe goes
no colour and no cut-off cell. Add another form of output here. Not here: which rows (`adapters.published.queries`).
"""

from __future__ import annotations

import base64
import csv
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from sr_assets.adapters.published.reading import Rows

Format = Literal["table", "json", "csv"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
_STYLES: Final = {
    "up": "green",
    "new": "green",
    "recover": "green",
    "ok": "green",
    "timeout": "yellow",
    "expire": "red",
    "failed": "red",
    "blind": "red",
    "unwatched": "dim",
    "retired": "dim",
}
_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))
#: A text that begins so is a formula for a spreadsheet; the second half are the full-width forms.
_FORMULA: Final = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
#: Control characters, but for the line breaks, which CSV can quote.
_CONTROL: Final = re.compile(r"[\x00-\x09\x0b\x0c\x0e-\x1f\x7f-\x9f]")
#: A longer table is drawn in blocks of so many rows, each with columns as wide as its own rows need.
_BLOCK_ROWS: Final = 10_000
#: The columns of the summary that fit a screen; those that are summed below it.
_SUMMARY: Final = (
    "replicator",
    "name",
    "stream",
    "observer",
    "up",
    "timeout",
    "retired",
    "new_24h",
    "advisories_1h",
    "last_advisory_age_seconds",
    "observer_age_seconds",
)
_SUMMED: Final = ("up", "timeout", "retired", "new_24h")


def console() -> Console:
    """Return stdout as rich writes it; as wide as the rows need when it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=100_000)


def show(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    form: Format,
    *,
    title: str | None = None,
    alarmed: Callable[[Sequence[Any]], bool] = lambda _: False,
) -> None:
    """Print rows in the chosen form as they come; the title, and the red of rows that are `alarmed`, are for people only."""
    if form == "json":
        print_json(dict(zip(columns, row, strict=True)) for row in rows)
    elif form == "csv":
        sys.stdout.writelines(csv_lines(itertools.chain([columns], rows)))
    else:
        for block in _blocks(rows):
            console().print(_table(columns, block, title, alarmed))


def _blocks(rows: Iterable[Sequence[Any]]) -> Iterator[list[Sequence[Any]]]:
    """Yield rows in lists of `_BLOCK_ROWS`; one that is empty when there are none."""
    left = iter(rows)
    yield list(itertools.islice(left, _BLOCK_ROWS))
    while block := list(itertools.islice(left, _BLOCK_ROWS)):
        yield block


def print_json(elements: Iterable[Any]) -> None:
    """Print a JSON array, one element a line."""
    before = "[\n"
    for element in elements:
        sys.stdout.write(before + json_line(element))
        before = ",\n"
    sys.stdout.write("[]\n" if before == "[\n" else "\n]\n")


def json_line(value: Any) -> str:
    """Return a value as JSON on one line."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def csv_lines(rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Yield rows as lines of CSV: None is empty, lists and objects are JSON, and no text is a formula in a spreadsheet."""
    # The writer returns what `write` returns, and quotes what is part of its line end: CR and LF.
    writer = csv.writer(SimpleNamespace(write=str), lineterminator="\r\n")
    for row in rows:
        line: str = writer.writerow([_csv_cell(value) for value in row])
        yield line.removesuffix("\r\n") + "\n"


def _csv_cell(value: Any) -> Any:
    cell = _cell(_plain(value))
    if not isinstance(cell, str):
        return cell
    shown = _CONTROL.sub(lambda letter: ascii(letter[0])[1:-1], cell)
    return f"'{shown}" if shown.lstrip("\r\n").startswith(_FORMULA) else shown


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value


def _plain(value: Any) -> Any:
    """Reduce a value to what JSON has: times become ISO text, bytes base64, what is no finite number null."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (float, Decimal)):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    return str(value)


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    title: str | None,
    alarmed: Callable[[Sequence[Any]], bool],
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for index, column in enumerate(columns):
        numbers = any(isinstance(row[index], (int, float)) and not isinstance(row[index], bool) for row in rows)
        header = column.removesuffix("_seconds").replace("_", " ")
        table.add_column(header, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        cells = (text(column, value) for column, value in zip(columns, row, strict=True))
        table.add_row(*cells, style="red" if alarmed(row) else None)
    return table


def text(column: str, value: Any) -> Text:
    """Return a value as people read it.

    Seconds as a duration, times to the second, nothing that could steer a terminal.
    """
    if value is None:
        return Text("-", style="dim")
    if column.endswith("_seconds") and isinstance(value, (int, float)):
        return Text(duration(value))
    if isinstance(value, datetime):
        return Text(value.strftime("%Y-%m-%d %H:%M:%S"))
    shown = str(_cell(_plain(value)))
    if not shown.isprintable():
        shown = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in shown)
    return Text(shown, style=_STYLES.get(shown, ""))


def duration(seconds: float) -> str:
    """Return seconds in their two largest units: 1h30m, 42s, 0.250s."""
    if abs(seconds) < 10 and seconds != int(seconds):
        return f"{seconds:.3f}s"
    left = int(abs(seconds))
    parts: list[str] = []
    for length, unit in _UNITS:
        count, left = divmod(left, length)
        if count or (unit == "s" and not parts):
            parts.append(f"{count}{unit}")
    return ("-" if seconds < 0 else "") + "".join(parts[:2])


def print_lines(columns: Sequence[str], rows: Iterable[Sequence[Any]], form: Format, *, header: bool) -> None:
    """Print rows as they come, one a line, at once: JSON objects, CSV (its header once), or plain text."""
    if form == "json":
        lines = "".join(json_line(dict(zip(columns, row, strict=True))) + "\n" for row in rows)
    elif form == "csv":
        lines = "".join(csv_lines([columns, *rows] if header else rows))
    else:
        lines = "".join(
            "  ".join(text(column, value).plain for column, value in zip(columns, row, strict=True)) + "\n"
            for row in rows
        )
    sys.stdout.write(lines)
    sys.stdout.flush()


def print_document(value: Any) -> None:
    """Print a JSON document for people, indented; nothing for None."""
    if value is not None:
        sys.stdout.write(json.dumps(_plain(value), indent=2) + "\n")


def print_node(tables: Iterable[tuple[str, Rows]], messages: Rows) -> None:
    """Print what is known of one node: its tables under their titles, then its newest message of each stream."""
    for title, rows in tables:
        show(rows.columns, rows.values, "table", title=title)
    for site, stream, stored_at, subject, payload_bytes, payload, metadata in messages.values:
        heading = f"{site}/{stream}: {payload_bytes} bytes on {subject}, stored {stored_at:%Y-%m-%d %H:%M:%S}"
        console().print(text("", heading))
        print_document(metadata if metadata is not None else payload)


def print_summary(rows: Rows) -> None:
    """Print what fits a screen of the summary: blind sites in red, below it the sums and what `blind` and `unwatched` mean."""
    records = [dict(zip(rows.columns, row, strict=True)) for row in rows.values]
    show(
        _SUMMARY,
        [[record[column] for column in _SUMMARY] for record in records],
        "table",
        alarmed=lambda row: row[_SUMMARY.index("observer")] == "blind",
    )
    sites = len({(record["replicator"], record["name"]) for record in records})
    blind = sum(record["observer"] == "blind" for record in records)
    up, silent, retired, new = (sum(record[column] for record in records) for column in _SUMMED)
    as_of = max(record["as_of"] for record in records)
    counted = f"{up} up, {silent} silent, {retired} retired, {new} new in 24 h"
    lines = [f"{sites} sites ({blind} blind): {counted}; as of {as_of:%Y-%m-%d %H:%M:%S}"]
    if blind:
        lines.append("blind: heartbeat overdue; node states may be stale")
    if any(record["observer"] == "unwatched" for record in records):
        lines.append("unwatched: no heartbeat was ever received; node states may be stale without notice")
    sys.stdout.write("\n".join(lines) + "\n")
