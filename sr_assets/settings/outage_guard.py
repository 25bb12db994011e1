"""The block `outage_guard`: the share of silent nodes that is an outage of their site."""

from collections.abc import Mapping
from typing import Annotated, Final

from sr_assets.domain.durations import duration
from sr_assets.domain.positions import SECOND_NS
from sr_assets.domain.tracking.outages import WHOLE, Guard
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.values import Duration, Positive, Value, read_text, shown

_PERCENT: Final = WHOLE // 100


def read_percentage(value: object) -> int:
    """Read a percentage above 0 and up to 100, in millionths; a number has no percent sign."""
    text = read_text(value)
    try:
        share = round(float(text.removesuffix("%")) * _PERCENT)
    except (ValueError, OverflowError):
        share = 0
    if not 0 < share <= WHOLE:
        raise ValueError(f"{shown(text)} is not a percentage; use more than 0% and at most 100%, such as 55%")
    return share


Percentage = Annotated[int, Value(read_percentage, type="percentage")]


class OutageGuardBlock(Block):
    """`outage_guard` of a stream."""

    partial: Percentage = file_key("an outage begins with this share of silent nodes", "55%")
    dark: Percentage = file_key("with this share, the site is dark", "100%")
    quiet_ns: Duration | None = file_key(
        "a node is silent after this time", None, name="quiet", default_text="half of `warn_duration`"
    )
    hold_ns: Duration = file_key("the longest time that announcements are held", "1d", name="hold")
    min_nodes: Positive = file_key("fewer nodes have no outage", 10)

    def guard(self, warning_ns: int, classes: Mapping[str, int]) -> Guard:
        """Return the guard of a stream with its `warn_duration` and those of its classes.

        Raises ValueError if the keys contradict each other.
        """
        if self.dark < self.partial:
            percent = f"{self.dark / _PERCENT:g}%"
            raise ValueError(
                f"outage_guard: dark: {percent} is below partial; use at least {self.partial / _PERCENT:g}%"
            )
        quiet_ns = self._quiet_of(warning_ns, "warn_duration")
        limits: dict[str | None, tuple[int, int]] = {
            name: (self._quiet_of(own_ns, f"warn_duration of class {shown(name)}"), own_ns)
            for name, own_ns in classes.items()
        }
        return Guard(self.partial, self.dark, quiet_ns, self.hold_ns, self.min_nodes, warning_ns, limits)

    def _quiet_of(self, warning_ns: int, key: str) -> int:
        quiet_ns = warning_ns // 2 if self.quiet_ns is None else self.quiet_ns
        if quiet_ns >= warning_ns:
            quiet, limit = duration(quiet_ns / SECOND_NS), duration(warning_ns / SECOND_NS)
            raise ValueError(f"outage_guard: quiet: {quiet} is not shorter than {key} ({limit}); use a shorter time")
        return quiet_ns
