"""Output of rows as a table, JSON or CSV, for every command; a table is no wider than the window.

A narrow window keeps the columns in `first`, shortened if necessary, and as many others as fit; a note below lists the
omitted ones. A pipe receives every column at full width.

JSON is one array of objects, or one object per line; CSV has a header. Both have times in ISO 8601, UTC.
"""

import base64
import csv
import itertools
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, Final, Literal, get_args

from rich.cells import cell_len, set_cell_size

from sr_assets.adapters import times
from sr_assets.domain.durations import duration
from sr_assets.domain.foreign_text import visible

_GAP: Final = 2
#: A kept column is shortened to this width before another column is omitted.
_SHORTEST: Final = 12
_COLOURS: Final = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}
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
#: Letters of `2026-01-02 03:04:05`.
_TO_SECONDS: Final = 19
#: Assumed widths of columns whose rows have not arrived yet.
_WIDTHS: Final = {"event_time": 19, "node": 32, "name": 12, "replicator": 12, "stream": 20, "event": 7} | dict.fromkeys(
    ("detected_at", "seen", "received_at", "published_at"), 19
)


def window() -> int | None:
    """Return the terminal's width in columns, or None if stdout is not a terminal: then lines have no limit."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def coloured(text: str, style: str | None) -> str:
    """Return text in a style if stdout is a terminal with colours and NO_COLOR is unset."""
    return f"\x1b[{_COLOURS[style]}m{text}\x1b[0m" if style and _has_colours() else text


def _has_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _width(text: str) -> int:
    """Return the columns that printable text takes on a terminal."""
    return len(text) if text.isascii() else cell_len(text)


class Layout:
    """Visible columns and their widths; `widths` are the needed widths, `first` the columns to keep."""

    def __init__(
        self, headers: Sequence[str], widths: Sequence[int], first: Sequence[int], right: frozenset[int] = frozenset()
    ) -> None:
        self._headers = headers
        self._right = right
        self._coloured = _has_colours()
        needed = [max(_width(header), width) for header, width in zip(headers, widths, strict=True)]
        limit = window()
        self._shown = dict(enumerate(needed)) if limit is None else _choose(needed, first or (0,), limit)

    @property
    def omitted(self) -> list[str]:
        """Headers of the columns that do not fit."""
        return [header for index, header in enumerate(self._headers) if index not in self._shown]

    def header(self) -> str:
        return self.line([(header, "bold") for header in self._headers])

    def line(self, cells: Sequence[tuple[str, str | None]], style: str | None = None) -> str:
        """Return a row of styled cells as a line; `style` overrides the styles of the cells."""
        parts = []
        for index, width in self._shown.items():
            text, own = cells[index]
            blanks = width - _width(text)
            if blanks < 0:
                text, blanks = set_cell_size(text, width - 1) + "…", 0
            if self._coloured:
                text = coloured(text, style or own)
            parts.append(" " * blanks + text if index in self._right else text + " " * blanks)
        return (" " * _GAP).join(parts).rstrip()


def _choose(needed: Sequence[int], first: Sequence[int], limit: int) -> Mapping[int, int]:
    """Return the columns that fit into `limit`, with their widths, in table order."""
    kept = {index: needed[index] for index in first}
    while (excess := _total(kept) - limit) > 0:
        widest = max(kept, key=lambda index: kept[index])
        if kept[widest] > _SHORTEST:
            kept[widest] = max(_SHORTEST, kept[widest] - excess)
        elif len(kept) > 1:
            kept.popitem()
        else:
            kept[widest] = max(2, limit)
            break
    for index, width in enumerate(needed):
        if index not in first and _total(kept) + _GAP + width <= limit:
            kept[index] = width
    return dict(sorted(kept.items()))


def _total(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def note(text: str) -> Iterator[str]:
    """Yield a note below a table as lines that fit the window."""
    for line in textwrap.wrap(text, window() or len(text) + 1):
        yield coloured(line, "dim")


def record(headers: Sequence[str], cells: Sequence[tuple[str, str | None]]) -> Iterator[str]:
    """Yield one row with a line per column, for a row that is wider than the window; long values wrap."""
    label = max(map(_width, headers))
    room = max(8, (window() or sys.maxsize) - label - _GAP)
    for header, (text, style) in zip(headers, cells, strict=True):
        lines = textwrap.wrap(text, room) or [""]
        for number, line in enumerate(lines):
            yield f"{header if number == 0 else '':<{label + _GAP}}{coloured(line, style)}"
    yield ""


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
    widths = [max((_width(row[index][0]) for row in cells), default=0) for index in range(len(columns))]
    fitted = Layout(headers, widths, first, frozenset(numbers))
    if wide and fitted.omitted:
        for styled in cells:
            yield from record(headers, styled)
        return
    yield fitted.header()
    for row, styled in zip(rows, cells, strict=True):
        yield fitted.line(styled, "red" if alarmed(row) else None)
    if fitted.omitted:
        yield from note(f"not shown: {', '.join(fitted.omitted)} (--wide shows all)")


def _header(column: str) -> str:
    return visible(column.removesuffix("_seconds").replace("_", " "))


def _styled(column: str, value: object) -> tuple[str, str | None]:
    shown = text(column, value)
    return shown, "dim" if value is None else _STYLES.get(shown)


def text(column: str, value: object) -> str:
    """Return a value for display: seconds as a duration, times to the second, terminal control characters escaped."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return visible(value)
    if column.endswith("_seconds") and isinstance(value, (int, float)):
        return duration(value)
    if isinstance(value, datetime):
        return str(value)[:_TO_SECONDS]
    return visible(str(_cell(_plain(value))))


class Lines:
    """Rows that are printed immediately as they arrive: JSON objects, CSV, or table lines with assumed widths."""

    def __init__(self, columns: Sequence[str], form: Format, first: Sequence[str]) -> None:
        self._columns = columns
        self._form = form
        headers, widths = [_header(column) for column in columns], [_WIDTHS.get(column, 0) for column in columns]
        self._layout = Layout(headers, widths, [columns.index(column) for column in first])

    def header(self) -> None:
        """Print the header; JSON has none."""
        if self._form == "csv":
            self._write(csv_lines([self._columns]))
        elif self._form != "json":
            self._write([self._layout.header() + "\n"])

    def rows(self, rows: Iterable[Sequence[Any]]) -> None:
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
    return f"as of {as_of:%Y-%m-%d %H:%M:%S} UTC, {duration(age_seconds(as_of))} old"


def print_note(remark: str) -> None:
    """Print a note above or below a table."""
    sys.stdout.writelines(f"{line}\n" for line in note(visible(remark)))


def print_document(value: object) -> None:
    """Print an indented JSON document, or nothing for None."""
    if value is not None:
        sys.stdout.write(json.dumps(_plain(value), indent=2) + "\n")
