"""`data.json` in the home: the last known value of each `source/key`, with the time at which it was read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sr_assets.adapters import times
from sr_assets.adapters.locking import locked_folder
from sr_assets.adapters.private import write_private
from sr_assets.adapters.published.actions import record_action
from sr_assets.domain.durations import duration
from sr_assets.domain.errors import cannot_write
from sr_assets.domain.secrets import masked, quoted
from sr_assets.settings.references import Known, Origin

if TYPE_CHECKING:
    from sr_assets.settings import Settings

logger = logging.getLogger(__name__)
_FILE: Final = "data.json"
#: An unchanged value is written again after this time, for its age.
_YOUNG_NS: Final = 30 * 1_000_000_000


def read_known(home: Path, label: str) -> Known | None:
    """Return the last known value of `source/key`, or None."""
    row = _read(home).get(label)
    if row is None:
        return None
    return Known(row["value"], row["at_ns"], duration(max(0.0, (times.time_ns() - row["at_ns"]) // 1e9)))


def keep_values(settings: Settings) -> None:
    """Keep the values that were read, and record each dynamic one that changed in `operator_actions`.

    A full disk costs only the memory of values, so it is logged.
    """
    origins = {**settings.loaded.static, **settings.loaded.dynamic} if settings.loaded else {}
    if not origins or not settings.home.is_dir():
        return
    try:
        with locked_folder(settings.home):
            known = _read(settings.home)
            rows = {
                label: row for label, origin in origins.items() if (row := _row(origin, known.get(label))) is not None
            }
            if rows:
                write_private(settings.home / _FILE, json.dumps({**known, **rows}))
    except OSError as error:
        logger.warning("%s", cannot_write(settings.home / _FILE, error))
        return
    for label, row in rows.items():
        before = known.get(label)
        if before is not None and origins[label].reference.dynamic and before["value"] != row["value"]:
            texts = [masked(label, value, secret=origins[label].secret) for value in (before["value"], row["value"])]
            record_action(settings.home, "data change", label, " -> ".join(texts))
            logger.info("data %s: changed: %s", label, " -> ".join(quoted(label, text) for text in texts))


def _row(origin: Origin, before: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the row of a value to keep, or None if no source was read, or the kept row is the same and young."""
    if origin.kind == "earlier" or (origin.kind == "read" and not origin.at_ns):
        return None
    row = {"value": origin.value, "at_ns": origin.at_ns or times.time_ns()}
    young = before is not None and row["at_ns"] - before["at_ns"] < _YOUNG_NS
    return None if before is not None and young and before["value"] == row["value"] else row


def _read(home: Path) -> dict[str, Any]:
    try:
        rows = json.loads((home / _FILE).read_text(encoding="utf-8"))
        return {label: row for label, row in rows.items() if isinstance(row["at_ns"], int) and "value" in row}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
