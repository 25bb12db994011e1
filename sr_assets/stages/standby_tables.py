"""The tables of a follower: the site's newest checkpoint, published until this home leads.

The checkpoint is opened as a temporary state. The site's own state stays as it is, so a takeover starts as if this home had
shown nothing.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from sr_assets.adapters import times
from sr_assets.adapters.home import open_home
from sr_assets.adapters.private import own_folder
from sr_assets.adapters.published.fleet_file import Run
from sr_assets.adapters.published.manifest import is_published
from sr_assets.adapters.published.site_publishing import publish_site
from sr_assets.adapters.state.checkpoint import Stored, last_stored, note_stored, restore_checkpoint
from sr_assets.adapters.state.lock import SiteBusyError, SiteLock
from sr_assets.adapters.state.store import SiteState
from sr_assets.adapters.threads import BackgroundThread
from sr_assets.domain.errors import SrAssetsError, cannot_write
from sr_assets.stages.checkpointing import fetch_checkpoint, find_checkpoint, read_checkpoint
from sr_assets.stages.leadership import standby_line
from sr_assets.stages.site import published_sites, published_streams

if TYPE_CHECKING:
    from sr_assets.settings import Settings

logger = logging.getLogger(__name__)

#: The temporary state's folder in the site's. It remains only if an attempt was interrupted.
_FOLDER: Final = "standby"
_POLL_SECONDS: Final = 1.0
#: `snapshot_info.run_id` of a publication without a run.
_RUN_ID: Final = "checkpoint"


@contextlib.contextmanager
def follow_checkpoints(settings: Settings, sites: Iterable[str]) -> Iterator[None]:
    """Inside the block, show the newest checkpoint of each site that this home follows, at most once per interval."""
    followed = [FollowedSite(settings, site) for site in sites]
    followed = [each for each in followed if each.has_checkpoints]

    def follow() -> Generator[float]:
        while True:
            yield _POLL_SECONDS
            errors = []
            for each in followed:
                if thread.is_ending:
                    return
                try:
                    each.show_if_due()
                except Exception as error:  # noqa: BLE001  it delays no other site
                    errors.append(error)
            if errors:
                raise errors[0]

    thread = BackgroundThread("followed checkpoints", follow, join_seconds=None)
    with thread if followed else contextlib.nullcontext():
        yield


class FollowedSite:
    """A site whose checkpoints this home may show. An unusable one, or a failing store, is one warning per cause."""

    def __init__(self, settings: Settings, site: str) -> None:
        self._settings, self._site = settings, site
        store = settings.checkpoint_store(site)
        elected = any(entry.leader_election_name for entry in settings.sites[site])
        self._interval_seconds = store.interval_ns / 1e9 if store else 0.0
        self.has_checkpoints = store is not None and elected
        self._due_at = 0.0
        self._problem = ""

    def show_if_due(self) -> None:
        """Show the newest checkpoint if this home is a follower and the last attempt is older than an interval."""
        if (
            not self.has_checkpoints
            or times.monotonic() < self._due_at
            or standby_line(self._settings, self._site) is None
        ):
            return
        problem = ""
        try:
            show_checkpoint(self._settings, self._site)
        except SiteBusyError:
            # The last run of a home that has just led.
            return
        except (SrAssetsError, OSError) as error:
            problem = str(error)
            if isinstance(error, OSError):
                problem = cannot_write(error.filename or self._settings.home, error)
            if problem != self._problem:
                logger.warning("%s: the newest checkpoint is not shown: %s", self._site, problem)
        self._problem, self._due_at = problem, times.monotonic() + self._interval_seconds


def show_checkpoint(settings: Settings, site: str) -> bool:
    """Publish the site's tables from its newest checkpoint; return False if they already show it, or this home leads.

    Call it while a process of this home campaigns. Raises RunError if the store does not respond or the checkpoint is
    unusable, and SiteBusyError if a run holds the site; the tables then stay.
    """
    store, folder = settings.checkpoint_store(site), settings.home / "sites" / site
    newest, temporary = find_checkpoint(settings, site), folder / _FOLDER
    if store is None or newest is None:
        return False
    known = last_stored(folder)
    # An earlier build stored less about a checkpoint.
    if known and newest[:2] == known[:2] and not temporary.exists() and is_published(settings.home, site):
        return False
    open_home(settings.home, settings.published_mode)
    shutil.rmtree(temporary, ignore_errors=True)
    own_folder(temporary)
    file = temporary / "checkpoint.zip"
    fetch_checkpoint(settings, store, site, file)
    about = read_checkpoint(settings, site, file)
    restore_checkpoint(file, about, temporary, settings.home.resolve())
    with SiteLock(folder, "a follower's publication", 0.0):
        # A new leader's run waits for the lock, and publishes its own state afterwards.
        if standby_line(settings, site) is None:
            return False
        with SiteState(temporary) as state:
            note_stored(folder, Stored(about.at_ns, about.positions, state.last_commit(), newest.markers))
            publish_site(
                settings.home,
                site,
                state,
                published_streams(settings.sites[site], frozenset(about.paused)),
                sites=published_sites(settings),
                run=Run(about.at_ns, _RUN_ID),
                mode=settings.published_mode,
            )
    shutil.rmtree(temporary, ignore_errors=True)
    return True
