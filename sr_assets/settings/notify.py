"""The block `notify`."""

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, model_validator

from sr_assets.settings.mapping import Raw
from sr_assets.settings.monitoring import EmailSettings, NotifySettings
from sr_assets.settings.shape import Text
from sr_assets.settings.values import one_of, read_port, read_secret, read_text, shown, whole_number

#: Events of notifications: the transitions of nodes, and failed streams.
EVENTS = ("new", "timeout", "recover", "expire", "failed")
_DEFAULT_EVENTS = ("timeout", "expire", "failed")


def _texts(value: Any) -> tuple[str, ...]:
    """Read a text or a list of texts."""
    items = value if isinstance(value, list) else [value]
    return tuple(read_text(item) for item in items)


def _events(value: Any) -> tuple[str, ...]:
    return tuple(one_of(*EVENTS)(item) for item in (value if isinstance(value, list) else [value]))


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


def _addresses(value: Any) -> tuple[str, ...]:
    """Read an address or a list of addresses."""
    addresses = tuple(map(_address, value if isinstance(value, list) else [value]))
    if not addresses:
        raise ValueError("is empty; add at least one address")
    return addresses


Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]


class RawEmail(Raw):
    """`email` of a notification."""

    host: Text
    port: Annotated[int, BeforeValidator(read_port)] | None = None
    sender: Annotated[str, BeforeValidator(_address)]
    to: Annotated[tuple[str, ...], BeforeValidator(_addresses)]
    tls: Annotated[Literal["none", "starttls", "tls"], BeforeValidator(one_of("none", "starttls", "tls"))] = "none"
    user: Text | None = None
    password: Annotated[str, BeforeValidator(read_secret)] | None = None


class RawNotify(Raw):
    """One of `notify`."""

    name: Text | None = None
    webhook: Annotated[str, BeforeValidator(_webhook)] | None = None
    command: Texts = ()
    email: RawEmail | None = None
    events: Annotated[tuple[str, ...], BeforeValidator(_events)] = _DEFAULT_EVENTS
    match: Texts = ()
    sites: Texts = ()
    min_nodes: Annotated[int, BeforeValidator(whole_number(1))] = 1

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if sum(map(bool, (self.webhook, self.command, self.email))) != 1:
            raise ValueError("needs exactly one of webhook, command and email")
        return self


def refuse_unknown_sites(entries: Sequence[RawNotify], names: Collection[str]) -> None:
    """Refuse a notification about an unknown site, and two with the same name."""
    for entry in entries:
        for site in entry.sites:
            if site not in names:
                raise ValueError(
                    f"notify.sites: {shown(site)} is no entry's name; there are: {', '.join(sorted(names))}"
                )
    taken = [entry.name for entry in entries if entry.name]
    for name in taken:
        if taken.count(name) > 1:
            raise ValueError(
                f"notify.name: {shown(name)} appears twice; delivered events are recorded by name, so rename one"
            )


def notify_settings(raw: RawNotify, number: int) -> NotifySettings:
    """Return the record of a notification; its index is the default name."""
    email = None
    if raw.email is not None:
        default = {"none": 25, "starttls": 587, "tls": 465}[raw.email.tls]
        email = EmailSettings(**{**raw.email.model_dump(), "port": raw.email.port or default})
    return NotifySettings(
        raw.name or str(number), raw.events, raw.webhook, raw.command, email, raw.match, raw.sites, raw.min_nodes
    )
