"""The blocks of the daily tables: `availability` and `inventory`."""

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
    """The time zone of a daily table's days, and their retention."""

    timezone: str = "UTC"
    retention_ns: int = _RETENTION_NS


def _facts(value: object) -> tuple[str, ...]:
    """Read the paths of facts."""
    if not isinstance(value, list):
        raise ValueError(f"{shown(value)} is not a list; use [os.name, role]")  # noqa: TRY004  pydantic requires ValueError
    facts = tuple(read_text(item) for item in value)
    for fact in facts:
        read_json_path(fact)
        if facts.count(fact) > 1:
            raise ValueError(f"names {shown(fact)} twice; remove one")
    return facts


class RawAvailability(Raw):
    """`availability`."""

    timezone: Annotated[str, BeforeValidator(read_timezone)] = "UTC"
    retention: Annotated[int, BeforeValidator(read_duration)] = _RETENTION_NS

    @property
    def settings(self) -> DailySettings:
        """The settings of the block."""
        return DailySettings(self.timezone, self.retention)


class RawInventory(RawAvailability):
    """`inventory`: the table's days, and the counted facts."""

    facts: Annotated[tuple[str, ...], BeforeValidator(_facts)] = ()
