"""Output of rows as a table, JSON or CSV, for every command.

JSON is one array of objects, or one object per line; CSV has a header. Both have times in ISO 8601, UTC.
"""

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
from typing import Any, Final, Literal, get_args

from rich.cells import cell_len

from sr_assets.adapters import times
from sr_assets.cli import layout
from sr_assets.domain.durations import duration
from sr_assets.domain.foreign_text import visible

#: `wide` is a table with every column, even if a row needs several lines.
Format = Literal["table", "json", "csv", "wide"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)[:3]
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
#: A spreadsheet takes text with these first characters for a formula; the second half are full-width forms.
_FORMULA: Final = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
#: Characters that control a terminal, or the direction of the text after them.
_HIDDEN: Final = r"\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
#: All that CSV escapes: not line breaks, which it can quote.
_CONTROL: Final = re.compile(rf"[\x00-\x09\x0b\x0c\x0e-\x1f{_HIDDEN}]")
#: All that JSON need not escape, and may.
_BARE: Final = re.compile(f"[{_HIDDEN}]")
#: Rows per block of a long table; each block has its own column widths.
_BLOCK_ROWS: Final = 10_000
#: Assumed widths of columns whose rows have not arrived yet.
_WIDTHS: Final = {"event_time": 19, "node": 32, "name": 12, "replicator": 12, "stream": 20, "event": 7} | dict.fromkeys(
    ("detected_at", "seen", "received_at", "published_at"), 19
)


def show(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    form: Format,
    *,
    title: str | None = None,
    first: Sequence[str] = (),
    alarmed: Callable[[Sequence[Any]], bool] = lambda _: False,
) -> None:
    """Print rows in the chosen format as they arrive.

    Only tables use `title`, the columns `first` that a narrow window keeps, and `alarmed`, which selects red rows.
    """
    if form == "json":
        print_json(dict(zip(columns, row, strict=True)) for row in rows)
    elif form == "csv":
        sys.stdout.writelines(csv_lines(itertools.chain([columns], rows)))
    else:
        if title:
            print_note(title)
        kept = [columns.index(column) for column in first]
        for block in _blocks(rows):
            sys.stdout.writelines(f"{line}\n" for line in _table(columns, block, kept, alarmed, wide=form == "wide"))


def _blocks(rows: Iterable[Sequence[Any]]) -> Iterator[list[Sequence[Any]]]:
    """Yield rows in lists of `_BLOCK_ROWS`, or one empty list if there are no rows."""
    left = iter(rows)
    yield list(itertools.islice(left, _BLOCK_ROWS))
    while block := list(itertools.islice(left, _BLOCK_ROWS)):
        yield block


def print_json(elements: Iterable[Any]) -> None:
    """Print a JSON array, one element per line."""
    before = "[\n"
    for element in elements:
        sys.stdout.write(before + json_line(element))
        before = ",\n"
    sys.stdout.write("[]\n" if before == "[\n" else "\n]\n")


def json_line(value: object) -> str:
    """Return a value as JSON on one line."""
    text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)
    return _BARE.sub(lambda letter: f"\\u{ord(letter[0]):04x}", text)


def csv_lines(rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Yield rows as lines of CSV: None is empty, lists and objects are JSON, and no text can act as a formula."""
    # The writer returns the result of `write`, and quotes the characters of its line end: CR and LF.
    writer = csv.writer(SimpleNamespace(write=str), lineterminator="\r\n")
    for row in rows:
        line: str = writer.writerow([_csv_cell(value) for value in row])
        yield line.removesuffix("\r\n") + "\n"


def _csv_cell(value: object) -> object:
    cell = _cell(_plain(value))
    if not isinstance(cell, str):
        return cell
    shown = _CONTROL.sub(lambda letter: ascii(letter[0])[1:-1], cell)
    return f"'{shown}" if shown.lstrip("\r\n").startswith(_FORMULA) else shown


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value


def _plain(value: object) -> object:
    """Convert a value to JSON types: times become ISO text, bytes base64, infinite numbers and NaN null."""
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
    first: Sequence[int],
    alarmed: Callable[[Sequence[Any]], bool],
    *,
    wide: bool,
) -> Iterator[str]:
    """Yield the lines of a table, and a note with the columns that do not fit the window."""
    headers = [_header(column) for column in columns]
    numbers = {
        index
        for row in rows
        for index, value in enumerate(row)
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    cells = [[_styled(column, value) for column, value in zip(columns, row, strict=True)] for row in rows]
    widths = [max((cell_len(row[index][0]) for row in cells), default=0) for index in range(len(columns))]
    fitted = layout.Layout(headers, widths, first, frozenset(numbers))
    if wide and fitted.omitted:
        for styled in cells:
            yield from layout.record(headers, styled)
        return
    yield fitted.header()
    for row, styled in zip(rows, cells, strict=True):
        yield fitted.line(styled, "red" if alarmed(row) else None)
    if fitted.omitted:
        yield from layout.note(f"not shown: {', '.join(fitted.omitted)} (--wide shows all)")


def _header(column: str) -> str:
    return visible(column.removesuffix("_seconds").replace("_", " "))


def _styled(column: str, value: object) -> tuple[str, str | None]:
    shown = text(column, value)
    return shown, "dim" if value is None else _STYLES.get(shown)


def text(column: str, value: object) -> str:
    """Return a value for display: seconds as a duration, times to the second, terminal control characters escaped."""
    if value is None:
        return "-"
    if column.endswith("_seconds") and isinstance(value, (int, float)):
        return duration(value)
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    return visible(str(_cell(_plain(value))))


class Lines:
    """Rows that are printed immediately as they arrive: JSON objects, CSV, or table lines with assumed widths."""

    def __init__(self, columns: Sequence[str], form: Format, first: Sequence[str]) -> None:
        self._columns = columns
        self._form = form
        headers, widths = [_header(column) for column in columns], [_WIDTHS.get(column, 0) for column in columns]
        self._layout = layout.Layout(headers, widths, [columns.index(column) for column in first])

    def header(self) -> None:
        """Print the header; JSON has none."""
        if self._form == "csv":
            self._write(csv_lines([self._columns]))
        elif self._form != "json":
            self._write([self._layout.header() + "\n"])

    def rows(self, rows: Iterable[Sequence[Any]]) -> None:
        """Print rows."""
        if self._form == "csv":
            self._write(csv_lines(rows))
        elif self._form == "json":
            self._write(json_line(dict(zip(self._columns, row, strict=True))) + "\n" for row in rows)
        else:
            for row in rows:
                cells = [_styled(column, value) for column, value in zip(self._columns, row, strict=True)]
                self._write([self._layout.line(cells) + "\n"])

    def _write(self, lines: Iterable[str]) -> None:
        sys.stdout.writelines(lines)
        sys.stdout.flush()


def age_seconds(time: datetime) -> int:
    """Return the age of a time by this machine's clock, or 0 for a future time."""
    return max(0, int((times.utc_now() - time).total_seconds()))


def age_text(as_of: datetime) -> str:
    """Return a time and its age as text."""
    return f"as of {as_of:%Y-%m-%d %H:%M:%S} UTC, {duration(age_seconds(as_of))} old"


def print_note(remark: str) -> None:
    """Print a note above or below a table."""
    sys.stdout.writelines(f"{line}\n" for line in layout.note(visible(remark)))


def print_document(value: object) -> None:
    """Print an indented JSON document, or nothing for None."""
    if value is not None:
        sys.stdout.write(json.dumps(_plain(value), indent=2) + "\n")
