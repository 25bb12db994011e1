"""The servers of a soak: an account with a limit, and copies of the source's store that replace it later, with its
earlier contents still readable.
"""

from __future__ import annotations

import os
import shutil
import signal
from typing import TYPE_CHECKING

from sr_assets.embedded.nats_server import NatsServer
from sr_assets_bench.comparison.source_rollback import Past
from sr_assets_bench.comparison.streams import held_now
from sr_assets_bench.soak.divided import DIVIDED
from sr_assets_bench.soak.ruled import GUARDED, RULED

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from sr_assets_tests.reference import Seen
    from sr_assets_tests.rig import Rig


_ACCOUNT = """
no_auth_user: soak
accounts {{ SOAK {{ jetstream {{ max_file: {max_file} }}, users: [{{user: soak, password: soak}}] }} }}
"""


class LimitedServer(NatsServer):
    """A server with one account, whose clients need no login, and whose storage can be limited while it runs."""

    def __init__(self, home: Path, name: str) -> None:
        super().__init__(home, name, config=_ACCOUNT.format(max_file=-1))

    def limit(self, max_file_bytes: int) -> None:
        """Let the account store at most this number of bytes, -1 for any; the server applies it soon."""
        self._config = _ACCOUNT.format(max_file=max_file_bytes)
        (self.home / "server.conf").write_text(self._configuration())
        os.kill(self.pid, signal.SIGHUP)


class SourceStore:
    """The store of a rig's source; it is copied and replaced only while the server is down."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        home = rig.source.home
        self._store, self._copy, self._past = home / "jetstream", home / "copy", home / "past"
        self._ends: dict[str, int] = {}
        self.times_put_back = 0

    def ends(self) -> dict[str, int]:
        """Return the last sequence of each of its streams; the server must be up."""
        streams = [entry["stream"] for entry in self._rig.entries if entry["stream"] not in (GUARDED, RULED, DIVIDED)]
        return {stream: self._rig.info(stream).last_sequence for stream in streams}

    def keep(self, ends: dict[str, int]) -> None:
        """Copy the store in its current state, replacing an earlier copy."""
        self._ends = ends
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._store, self._copy)

    def behind(self, positions: dict[str, int]) -> bool:
        """Return whether a message was read that the copy does not hold."""
        return any(positions.get(stream, 0) > end + 1 for stream, end in self._ends.items())

    def put_back(self) -> None:
        """Replace the store by the copy, as an operator would after the loss of a disk."""
        self._store.rename(self._home(self.times_put_back) / "jetstream")
        shutil.copytree(self._copy, self._store)
        self.times_put_back += 1

    def pasts(self, streams: Iterable[str]) -> dict[str, Past]:
        """Return the history of each stream."""
        held: dict[str, list[list[Seen]]] = {stream: [] for stream in streams}
        for number in range(self.times_put_back):
            with NatsServer(self._home(number), "past") as server:
                for stream, before in held.items():
                    before.append(held_now(self._rig, stream, server))
        log = (self._rig.home / "runs.log").read_text(errors="replace")
        return {stream: Past.of(stream, before, log) for stream, before in held.items()}

    def _home(self, number: int) -> Path:
        home = self._past / str(number)
        home.mkdir(parents=True, exist_ok=True)
        return home
