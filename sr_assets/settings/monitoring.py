"""Settings of metrics and notifications, as frozen records."""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Outlets of metrics: `port` None serves none, `textfile` None writes none.

    `legacy` adds the names of the Stream Replicator's first generation.
    """

    port: int | None = None
    host: str = "127.0.0.1"
    legacy: bool = False
    textfile: Path | None = None


@dataclass(frozen=True, slots=True)
class EmailSettings:
    """The mail server and the addresses of a notification by mail."""

    host: str
    sender: str
    to: tuple[str, ...]
    port: int = 25
    tls: Literal["none", "starttls", "tls"] = "none"
    user: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class NotifySettings:
    """One of `notify`: a receiver (`webhook`, `command` or `email`) and its events.

    `match` are shell patterns of nodes, `sites` names of entries; empty means all. Fewer simultaneous events than
    `min_nodes` are not sent.
    """

    name: str
    events: tuple[str, ...]
    webhook: str | None = field(default=None, repr=False)
    command: tuple[str, ...] = ()
    email: EmailSettings | None = None
    match: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    min_nodes: int = 1

    @property
    def label(self) -> str:
        """The receiver without its secrets, such as a webhook's path."""
        if self.webhook is not None:
            return f"notify {self.name} (webhook {urlsplit(self.webhook).hostname})"
        return f"notify {self.name} ({f'mail by {self.email.host}' if self.email else f'command {self.command[0]}'})"

    def wants(self, event: str, site: str, node: str | None) -> bool:
        """Return whether an event is sent; a failure has no node."""
        if event not in self.events or (self.sites and site not in self.sites):
            return False
        return node is None or not self.match or any(fnmatchcase(node, pattern) for pattern in self.match)
