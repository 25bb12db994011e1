"""How a deployment is watched from outside, as frozen records.

Not here: the other records (`records`), how the file is read (`loading`).
"""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Where metrics are shown: `port` None serves none, `textfile` None writes none.

    `legacy`: with the names of the Stream Replicator's first generation.
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
    """One of `notify`: to whom, by one of `webhook`, `command` and `email`, and which events.

    `match` are patterns of nodes as a shell has them, `sites` names of entries; empty: all. `min_nodes`: fewer at once are
    not worth a notification.
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
        """Whom it reaches, without a secret: a webhook's path is one."""
        if self.webhook is not None:
            return f"notify {self.name} (webhook {urlsplit(self.webhook).hostname})"
        return f"notify {self.name} ({f'mail by {self.email.host}' if self.email else f'command {self.command[0]}'})"

    def wants(self, event: str, site: str, node: str | None) -> bool:
        """Return whether an event is one to send; a failure has no node."""
        if event not in self.events or (self.sites and site not in self.sites):
            return False
        return node is None or not self.match or any(fnmatchcase(node, pattern) for pattern in self.match)
