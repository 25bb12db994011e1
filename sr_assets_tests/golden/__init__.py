"""Golden homes: archives `home-VERSION-DATE.tar.xz` in this folder, which the code of that day has written. They never change.

An archive has these parts:

- `home`: the home of a site and a centre, without Dagster's instance
- `servers/source`, `servers/target`: the JetStream stores of its two servers
- `configuration.json`: the configuration, with placeholders for the home and the servers
- `checkpoint`: a checkpoint of the site
- `facts.json`: the published tables, the copies, and what a user does next (`Facts`)
"""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any, Final, TypedDict, cast

from sr_assets.settings import Settings, load_settings
from sr_assets_tests.partitioned import sequences
from sr_assets_tests.rig import SITE, Rig, Sent
from sr_assets_tests.servers import NatsServer
from sr_assets_tests.travel import Travel

FOLDER: Final = Path(__file__).parent
CENTRE: Final = "CENTRE"
SITES: Final = (SITE, CENTRE)
_PARTS: Final = ("home", "servers", "configuration.json", "checkpoint", "facts.json")
#: Parts of a home and of a server that depend on the machine, or that the next start makes.
_LEFT_OUT: Final = ("home/replication.yaml", "home/dagster", "home/spark", "server.conf", "server.log", ".ports")
#: A message to publish: subject, headers and payload.
Posted = tuple[str, str, str]


class Facts(TypedDict):
    """What is known of a home at its end, and what a user does next."""

    #: When the recording ended, in unix ns.
    recorded_ns: int
    #: All rows of the published tables.
    tables: dict[str, list[dict[str, Any]]]
    #: The source sequences by stream: of the copies, of decided copies, of parked messages that are to be copied.
    copies: dict[str, list[int]]
    queued: dict[str, list[int]]
    resent: dict[str, list[int]]
    #: Ids of the advisories that wait for a stream, and of the events of which a receiver was notified.
    outbox: list[str]
    notified: list[str]
    #: Ids of the maintenance windows.
    windows: list[str]
    #: The streams of advisories.
    advisory_streams: list[str]
    #: Streams whose nodes keep their status for months.
    steady_streams: list[str]
    #: What lets all copies and advisories continue: commands, and streams to create or change (server, name, settings).
    commands: list[list[str]]
    streams: list[tuple[str, str, dict[str, Any]]]
    #: New messages by stream, each to be copied: subject, headers and payload.
    messages: dict[str, list[Posted]]


class Golden(Rig):
    """A rig whose folder has the parts of an archive."""

    @classmethod
    def at(cls, folder: Path, clocks: Travel | None = None) -> Golden:
        """Return the rig of a new folder; its servers are not started."""
        (folder / "home").mkdir(parents=True)
        source, target = (NatsServer(folder / "servers" / name, name) for name in ("source", "target"))
        return cls(folder / "home", source, target, str, clocks=clocks)

    @property
    def folder(self) -> Path:
        """The folder with the parts."""
        return self.home.parent

    @property
    def configuration(self) -> Path:
        """The file with the configuration of this home and these servers, which `settings` writes."""
        return self.home / "replication.yaml"

    def settings(self, **top: Any) -> Settings:
        """Load the configuration, with other keys of the top level."""
        document = json.loads((self.folder / "configuration.json").read_text())
        text = json.dumps(document | top)
        for name, value in {"HOME": str(self.home), "SOURCE": self.source.url, "TARGET": self.target.url}.items():
            text = text.replace(f"@{name}@", value)
        self.configuration.write_text(text)
        return load_settings(self.configuration, {})

    def facts(self) -> Facts:
        """Return the facts of the archive."""
        return cast("Facts", json.loads((self.folder / "facts.json").read_text()))

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return all published tables, as JSON can hold them."""
        names = [row["name"] for row in self.rows("SHOW TABLES")]
        tables = {name: self.rows(name) for name in names}
        return cast("dict[str, list[dict[str, Any]]]", json.loads(json.dumps(tables, default=str)))

    def copied(self) -> dict[str, list[int]]:
        """Return the source sequences of all copies, in their order, by stream."""
        return {entry.stream: sequences(self.copies(entry.target_stream)) for entry in self.settings().streams}

    def notified(self) -> list[str]:
        """Return the ids of the events of which the receiver was notified; it writes `notified`."""
        file = self.folder / "notified"
        return re.findall(r'"event_id": ?"([^"]+)"', file.read_text()) if file.exists() else []

    def send(self, messages: dict[str, list[Posted]]) -> None:
        """Publish messages on the source, by stream."""
        for stream, some in messages.items():
            self.publish(stream, [Sent(body.encode(), subject, headers.encode()) for subject, headers, body in some])


def pack(folder: Path, archive: Path) -> None:
    """Write the parts of a folder into an archive."""

    def anonymous(part: tarfile.TarInfo) -> tarfile.TarInfo | None:
        part.uid = part.gid = 0
        part.uname = part.gname = ""
        return None if part.name.endswith(_LEFT_OUT) else part

    with tarfile.open(archive, "x:xz", preset=9) as file:
        for name in _PARTS:
            file.add(folder / name, name, filter=anonymous)


def unpack(archive: Path, folder: Path) -> None:
    """Restore the parts of an archive in a folder."""
    with tarfile.open(archive) as file:
        # Before Python 3.11.4 there are no filters, and the attribute has no effect.
        file.extraction_filter = getattr(tarfile, "data_filter", None)
        file.extractall(folder)
