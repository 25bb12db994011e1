"""The blocks of the daily tables: `availability` and `inventory`.

Not here: the tables (`adapters.published.daily`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator

from sr_assets.domain.positions import DAY_NS
from sr_assets.settings.mapping import Raw
from sr_assets.settings.names import read_json_path
from sr_assets.settings.values import read_duration, read_text, read_timezone, shown

_RETENTION_NS = 730 * DAY_NS


@dataclass(frozen=True, slots=True)
class DailySettings:
    """Where the days of a daily table begin, and how long they are kept."""

    timezone: str = "UTC"
    retention_ns: int = _RETENTION_NS


def _facts(value: object) -> tuple[str, ...]:
    """Read the paths of facts."""
    if not isinstance(value, list):
        raise ValueError(f"{shown(value)} is no list: write the facts' names as [os.name, role]")  # noqa: TRY004  pydantic takes no other
    facts = tuple(read_text(item) for item in value)
    for fact in facts:
        read_json_path(fact)
        if facts.count(fact) > 1:
            raise ValueError(f"names {shown(fact)} twice; take one out")
    return facts


class RawAvailability(Raw):
    """`availability`."""

    timezone: Annotated[str, BeforeValidator(read_timezone)] = "UTC"
    retention: Annotated[int, BeforeValidator(read_duration)] = _RETENTION_NS

    @property
    def settings(self) -> DailySettings:
        """The block for Settings."""
        return DailySettings(self.timezone, self.retention)


class RawInventory(RawAvailability):
    """`inventory`: the table's days, and which facts are counted."""

    facts: Annotated[tuple[str, ...], BeforeValidator(_facts)] = ()
