"""Publishing a site's tables: files of its own, and a `fleet.duckdb` that shows them beside the other sites'.

A publication costs what its site has: the other sites' files are neither read nor written again. Readers keep what they
opened; the next open sees the new one. Payloads are not copied: `node_snapshots` is a view over the Parquet history. Not
here: the tables (`schema`), each of the steps (`site_files`, `publication`, `index`), reading them (`reading`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sr_assets.adapters.checkpoints import Point, reach
from sr_assets.adapters.private import make_shared_folder
from sr_assets.adapters.published.fleet_lock import LOCK_SECONDS
from sr_assets.adapters.published.index import Run, publish_index
from sr_assets.adapters.published.manifest import read_manifest
from sr_assets.adapters.published.publication import publication_folder, read_publication, sweep, write_publication
from sr_assets.adapters.published.site_files import write_site
from sr_assets.domain.errors import RunError, cannot_write

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sr_assets.adapters.published.site_files import PublishedStream
    from sr_assets.adapters.state.store import SiteState


def publish_site(
    home: Path,
    name: str,
    state: SiteState,
    streams: Sequence[PublishedStream],
    *,
    sites: Sequence[str],
    run: Run,
    mode: int = 0o600,
    wait_seconds: float = LOCK_SECONDS,
) -> None:
    """Replace a site's rows in the published tables, files of permissions `mode`. Called inside the site's lock.

    Of a stream or feed that `streams` does not name but the state knows, the rows stay. Sites not among `sites` are shown no
    more. Raises RunError when something cannot be written, FleetBusyError when another site holds `fleet.lock` for
    `wait_seconds` on: then the old tables stay.
    """
    folder = publication_folder(home, name)
    try:
        make_shared_folder(folder)
        before = read_publication(folder)
        written = write_site(folder, name, state, streams, since=read_manifest(home).number, before=before, mode=mode)
        publication = write_publication(folder, written, before)
        reach(Point.NOTED_TABLES)
        shown = publish_index(
            state.connection, home, publication, sites=sites, run=run, mode=mode, wait_seconds=wait_seconds
        )
        sweep(folder, publication, shown.numbers)
    except OSError as error:
        raise RunError(cannot_write(folder, error)) from None
