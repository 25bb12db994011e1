"""The block `notify`: the receivers of notifications, and their events."""

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from sr_assets.settings.mapping import Block, file_key
from sr_assets.settings.values import (
    Port,
    Positive,
    Secret,
    Text,
    Texts,
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
_MAIL_PORTS = {"none": 25, "starttls": 587, "tls": 465}
_EVENT = choice(Event)


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

    host: Text = file_key("the mail server")
    port: Port = file_key("its port", 0, default_text="25; 587 with `starttls`; 465 with `tls`")
    sender: Address = file_key("the sender")
    to: Annotated[tuple[Address, ...], Value(as_list, type="address, or a list of them"), Field(min_length=1)] = (
        file_key("the receivers")
    )
    tls: Annotated[MailTls, choice(MailTls)] = file_key("the encryption", "none")
    user: Text | None = file_key("the login", None)
    password: Secret | None = file_key("its password", None, secret=True)

    @model_validator(mode="after")
    def _with_port(self) -> Self:
        return self if self.port else self.changed(port=_MAIL_PORTS[self.tls])


class NotifySettings(Block):
    """One of `notify`: a receiver and its events. Fewer simultaneous events than `min_nodes` are not sent."""

    name: Text = file_key("identifies the receiver", "", default_text="by index")
    webhook: Annotated[str, Value(_webhook, type="URL")] | None = file_key(
        "a URL; one of `webhook`, `command` and `email` is required", None, secret=True
    )
    command: Texts = file_key("a program with its arguments", [], default_text="none")
    email: EmailSettings | None = file_key("[a mail](#block-email)", None)
    events: Annotated[tuple[Annotated[Event, _EVENT], ...], Value(as_list, type=f"list of {_EVENT.type}")] = file_key(
        "the events",
        ["timeout", "expire", "failed", "partial", "dark", "restored", "flapping", "settled"],
        default_text="all except `new` and `recover`",
    )
    match: Texts = file_key("patterns of nodes", [], default_text="all")
    sites: Texts = file_key("names of sites", [], default_text="all")
    min_nodes: Positive = file_key("minimum number of nodes within 5 minutes", 1)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if sum(map(bool, (self.webhook, self.command, self.email))) != 1:
            raise ValueError("needs exactly one of webhook, command and email")
        return self

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
