"""The blocks `maintenance`: windows during which transitions are recorded but not announced."""

import hashlib
from collections.abc import Collection, Iterable
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Annotated, Self

from croniter import CroniterBadDateError, CroniterError, croniter
from pydantic import model_validator

from sr_assets.domain.errors import did_you_mean
from sr_assets.domain.positions import format_rfc3339_ns
from sr_assets.domain.tracking.maintenance import Window
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.values import Duration, Text, Texts, Time, Value, read_text, shown


def _cron(value: object) -> str:
    """Read a cron expression of five fields that fires at least once."""
    text = read_text(value)
    try:
        if len(text.split()) != 5:
            raise ValueError
        croniter(text, datetime(2000, 1, 1, tzinfo=UTC)).get_next()
    except CroniterBadDateError:
        raise ValueError(f"{shown(text)} never fires; use a day that its month has") from None
    except (CroniterError, ValueError):
        raise ValueError(
            f"{shown(text)} is not a cron expression; use five fields (minute hour day month weekday) such as '0 2 * * 6'"
        ) from None
    return text


class MaintenanceBlock(Block):
    """One of `maintenance`: a window, once (`from`, `to`) or by `cron` with a length (`for`)."""

    match: Texts = file_key("globs of nodes", [], default_text="all nodes")
    classes: Texts = file_key("[classes](#block-classes) of nodes", [], name="class", default_text="all nodes")
    site: Text | None = file_key("glob of sites", None, default_text="all sites")
    from_ns: Time | None = file_key("the beginning of a single window", None, name="from")
    to_ns: Time | None = file_key("its end, which is no longer part of it", None, name="to")
    cron: Annotated[str, Value(_cron, type="cron expression, UTC")] | None = file_key(
        "the beginnings of repeated windows: minute, hour, day, month, weekday", None
    )
    for_ns: Duration | None = file_key("their length", None, name="for")
    reason: Text = file_key("the reason, for people", "")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        once, repeated = (self.from_ns, self.to_ns), (self.cron, self.for_ns)
        if None in (once if repeated == (None, None) else repeated) or (any(once) and any(repeated)):
            raise ValueError("needs from and to, or cron and for; set one of the two pairs")
        if self.from_ns is not None and self.to_ns is not None and self.from_ns >= self.to_ns:
            times = [format_rfc3339_ns(ns).replace(".000000000Z", "Z") for ns in (self.to_ns, self.from_ns)]
            raise ValueError(f"to: {times[0]} is not after from ({times[1]}); set a later time")
        return self

    def about(self, site: str) -> bool:
        """Return whether the window is about a site."""
        return self.site is None or fnmatchcase(site, self.site)

    @property
    def window(self) -> Window:
        """The window of the rules; the same keys and values always have the same id."""
        keys = (self.match, self.site, self.from_ns, self.to_ns, self.cron, self.for_ns)
        name = hashlib.sha256(repr(keys + (self.classes and (self.classes,))).encode()).hexdigest()[:8]
        times = self.from_ns or 0, self.to_ns or 0, self.cron, self.for_ns or 0
        return Window(name, self.match, *times, self.reason, self.classes)


def unknown_class(names: Iterable[str], known: Collection[str]) -> str | None:
    """Return the problem and the remedy of the first name that is no known class, or None."""
    for name in names:
        if name not in known:
            classes = f"classes: {', '.join(dict.fromkeys(known))}" if known else "add it to classes"
            return f"{shown(name)} is not a class of these streams; {did_you_mean(name, known)}{classes}"
    return None


def refuse_unknown_classes(blocks: Iterable[MaintenanceBlock], known: Collection[str]) -> None:
    """Raise ValueError for a block about a class that is not known."""
    for block in blocks:
        if problem := unknown_class(block.classes, known):
            raise ValueError(f"maintenance: class: {problem}")


def refuse_other_sites(blocks: Iterable[MaintenanceBlock], sites: Collection[str]) -> None:
    """Raise ValueError for a block about none of the sites."""
    for block in blocks:
        if not any(map(block.about, sites)):
            raise ValueError(f"maintenance: site: {shown(block.site)} matches no site; sites: {', '.join(sites)}")
