"""The block `notify`: the receivers of notifications, and their events."""

import re
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, time, timedelta
from fnmatch import fnmatchcase
from typing import Annotated, Final, Literal, Self, get_args
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from pydantic import Field, model_validator

from sr_assets.domain.clusters import is_loopback
from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.values import (
    Duration,
    Port,
    Positive,
    Secret,
    Text,
    Texts,
    Timezone,
    Value,
    as_list,
    choice,
    read_secret,
    read_text,
    shown,
)

#: Events of notifications: the transitions of nodes, and failed streams.
Event = Literal["new", "timeout", "recover", "expire", "failed", "partial", "dark", "restored", "flapping", "settled"]
MailTls = Literal["none", "starttls", "tls"]
Weekday = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
_MAIL_PORTS = {"none": 25, "starttls": 587, "tls": 465}
_EVENT = choice(Event)
_WEEKDAY = choice(Weekday)
_WEEKDAYS: Final[tuple[Weekday, ...]] = get_args(Weekday)
#: Any week without a change of the clocks shows whether quiet hours ever end.
_MONDAY: Final = datetime(2026, 1, 5)  # noqa: DTZ001  each zone's wall clock


def _webhook(value: object) -> str:
    """Read a URL; errors show no part of it, because its path is a secret."""
    url = read_secret(value)
    refusal = ValueError("is not a webhook URL; use http://… or https://…, with special characters percent-encoded")
    try:
        parts, port = urlsplit(url), urlsplit(url).port
    except ValueError:
        raise refusal from None
    if "@" in parts.netloc:
        raise ValueError("has a login in its URL, which is not supported; use a command such as curl")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not re.fullmatch(r"[!-~]+", url):
        raise refusal
    return url


def _address(value: object) -> str:
    text = read_text(value)
    if not re.fullmatch(r"(?:[^@<>]* <)?[^\s@<>,;]+(?:@[^\s@<>,;]+)?>?", text):
        raise ValueError(f"{shown(text)} is not an address; use name@domain, or Name <name@domain>")
    return text


Address = Annotated[str, Value(_address, type="address")]


class EmailSettings(Block):
    """`email` of a notification: the mail server and the addresses."""

    host: Text = file_key("the mail server", local=True)
    port: Port = file_key("its port", 0, default_text="25; 587 with `starttls`; 465 with `tls`")
    sender: Address = file_key("the sender")
    to: Annotated[tuple[Address, ...], Value(as_list, type="address, or a list of them"), Field(min_length=1)] = (
        file_key("the receivers")
    )
    tls: Annotated[MailTls, choice(MailTls)] = file_key("the encryption", "none")
    user: Text | None = file_key("the login", None)
    password: Secret | None = file_key("its password", None, secret=True)

    @model_validator(mode="after")
    def _password_is_encrypted(self) -> Self:
        if self.password is not None and self.tls == "none" and not is_loopback(self.host):
            raise ValueError(f"password: would travel unencrypted to {self.host}; set tls: starttls or tls: tls")
        return self

    @model_validator(mode="after")
    def _with_port(self) -> Self:
        return self if self.port else self.changed(port=_MAIL_PORTS[self.tls])


def _time_of_day(value: object) -> time:
    text = read_text(value)
    try:
        if not re.fullmatch(r"\d\d:\d\d(:\d\d)?", text):
            raise ValueError
        return time.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{shown(text)} is not a time of day; use HH:MM from 00:00 to 23:59") from None


TimeOfDay = Annotated[time, Value(_time_of_day, type="time of day (HH:MM)")]


class QuietHours(Block):
    """One of `quiet_hours` of a notification: from one time of a zone's wall clock to the next other one."""

    begin: TimeOfDay = file_key("their beginning", name="from")
    end: TimeOfDay = file_key("their end, on the next day unless it is later; at the same time, 24 hours", name="to")
    days: Annotated[tuple[Annotated[Weekday, _WEEKDAY], ...], Value(as_list, type=f"list of {_WEEKDAY.type}")] = (
        file_key("the days on which they begin", [], default_text="every day")
    )
    timezone: Timezone = file_key("the time zone of both times", "UTC")

    def cover(self, at: datetime) -> bool:
        """Return whether a time, with its zone, is quiet."""
        local = at.astimezone(ZoneInfo(self.timezone))
        now, today = local.time(), local.weekday()
        if self.begin < self.end:
            return self.begin <= now < self.end and self._begin_on(today)
        return (now >= self.begin and self._begin_on(today)) or (now < self.end and self._begin_on(today - 1))

    def _begin_on(self, weekday: int) -> bool:
        return not self.days or _WEEKDAYS[weekday] in self.days

    def ends(self) -> Iterator[datetime]:
        """Yield the ends within a week."""
        for number in range(7):
            if self._begin_on(number):
                day = _MONDAY + timedelta(days=number + (self.begin >= self.end))
                yield datetime.combine(day, self.end, ZoneInfo(self.timezone))


class RateLimit(Block):
    """`rate_limit` of a notification."""

    messages: Positive = file_key("the most messages")
    within_ns: Duration = file_key("in this time", "1h", name="within")


class NotifySettings(Block):
    """One of `notify`: a receiver and its events. Fewer simultaneous events than `min_nodes` are not sent."""

    name: Text = file_key("identifies the receiver", "", default_text="by index")
    webhook: Annotated[str, Value(_webhook, type="URL")] | None = file_key(
        "a URL; one of `webhook`, `command` and `email` is required", None, secret=True
    )
    command: Texts = file_key("a program with its arguments", [], default_text="none", local=True)
    environment: Texts = file_key(
        "variables of the configuration, such as `${NAME}` of a password, that the command may have too",
        [],
        default_text="none",
        local=True,
    )
    email: EmailSettings | None = file_key("[a mail](#block-email)", None)
    events: Annotated[tuple[Annotated[Event, _EVENT], ...], Value(as_list, type=f"list of {_EVENT.type}")] = file_key(
        "the events",
        ["timeout", "expire", "failed", "partial", "dark", "restored", "flapping", "settled"],
        default_text="all except `new` and `recover`",
    )
    match: Texts = file_key("patterns of nodes", [], default_text="all")
    sites: Texts = file_key("names of sites", [], default_text="all")
    min_nodes: Positive = file_key("minimum number of nodes within 5 minutes", 1)
    rate_limit: RateLimit | None = file_key("[the most messages](#block-rate_limit) in a time", None)
    quiet_hours: Annotated[tuple[QuietHours, ...], Value(as_list, type="block, or a list of blocks")] = file_key(
        "[times](#block-quiet_hours) without messages", [], default_text="none"
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if sum(map(bool, (self.webhook, self.command, self.email))) != 1:
            raise ValueError("needs exactly one of webhook, command and email")
        return self

    @model_validator(mode="after")
    def _ever_heard(self) -> Self:
        if self.quiet_hours and all(self.is_quiet(end) for hours in self.quiet_hours for end in hours.ends()):
            raise ValueError("quiet_hours: cover the whole week, so that the receiver gets no message; shorten them")
        return self

    def is_quiet(self, at: datetime) -> bool:
        """Return whether the quiet hours forbid messages at a time, which has a zone."""
        return any(hours.cover(at) for hours in self.quiet_hours)

    @property
    def label(self) -> str:
        """The receiver without its secrets, such as a webhook's path."""
        if self.webhook is not None:
            return f"notify {self.name} (webhook {urlsplit(self.webhook).hostname})"
        return f"notify {self.name} ({f'mail by {self.email.host}' if self.email else f'command {self.command[0]}'})"

    def wants(self, event: str, site: str, node: str | None) -> bool:
        """Return whether an event is sent; a failure and a site event have no node."""
        if event not in self.events or (self.sites and site not in self.sites):
            return False
        return node is None or not self.match or any(fnmatchcase(node, pattern) for pattern in self.match)


def refuse_unknown_sites(entries: Sequence[NotifySettings], names: Collection[str]) -> None:
    """Refuse a notification about an unknown site, and two with the same name."""
    for entry in entries:
        for site in entry.sites:
            if site not in names:
                raise ValueError(
                    f"notify.sites: {shown(site)} is no entry's name; there are: {', '.join(sorted(names))}"
                )
    chosen = [entry.name or str(number) for number, entry in enumerate(entries, 1)]
    for name in chosen:
        if chosen.count(name) > 1:
            raise ValueError(
                f"notify.name: {shown(name)} appears twice; delivered events are recorded by name, so rename one"
            )
