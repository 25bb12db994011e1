"""Tables as lines of text: one line per row, no wider than the window.

A narrow window keeps the columns in `first`, shortened if necessary, and as many others as fit; a note below lists the
omitted ones. A pipe receives every column at full width.
"""

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rich.cells import cell_len, set_cell_size

_GAP: Final = 2
#: A kept column is shortened to this width before another column is omitted.
_SHORTEST: Final = 12
_COLOURS: Final = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}


def window() -> int | None:
    """Return the terminal's width in columns, or None if stdout is not a terminal: then lines have no limit."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def coloured(text: str, style: str | None) -> str:
    """Return text in a style if stdout is a terminal with colours and NO_COLOR is unset."""
    if not style or not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{_COLOURS[style]}m{text}\x1b[0m"


class Layout:
    """Visible columns and their widths; `widths` are the needed widths, `first` the columns to keep."""

    def __init__(
        self, headers: Sequence[str], widths: Sequence[int], first: Sequence[int], right: frozenset[int] = frozenset()
    ) -> None:
        self._headers = headers
        self._right = right
        needed = [max(cell_len(header), width) for header, width in zip(headers, widths, strict=True)]
        limit = window()
        self._shown = dict(enumerate(needed)) if limit is None else _choose(needed, first or (0,), limit)

    @property
    def omitted(self) -> list[str]:
        """Headers of the columns that do not fit."""
        return [header for index, header in enumerate(self._headers) if index not in self._shown]

    def header(self) -> str:
        """Return the header line."""
        return self.line([(header, "bold") for header in self._headers])

    def line(self, cells: Sequence[tuple[str, str | None]], style: str | None = None) -> str:
        """Return a row of styled cells as a line; `style` overrides the styles of the cells."""
        parts = []
        for index, width in self._shown.items():
            text, own = cells[index]
            if cell_len(text) > width:
                text = set_cell_size(text, width - 1) + "…"
            blank = " " * (width - cell_len(text))
            parts.append((blank if index in self._right else "") + coloured(text, style or own))
            parts.append(("" if index in self._right else blank) + " " * _GAP)
        return "".join(parts).rstrip()


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
    label = max(map(cell_len, headers))
    room = max(8, (window() or sys.maxsize) - label - _GAP)
    for header, (text, style) in zip(headers, cells, strict=True):
        lines = textwrap.wrap(text, room) or [""]
        for number, line in enumerate(lines):
            yield f"{header if number == 0 else '':<{label + _GAP}}{coloured(line, style)}"
    yield ""
