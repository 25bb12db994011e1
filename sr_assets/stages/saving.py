"""The command `checkpoint`: a checkpoint on request, written by the active run or, without one, by the command."""

from pathlib import Path
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.state.checkpoint import last_stored
from sr_assets.adapters.state.checkpoint_request import is_pending, request_checkpoint, withdraw_request
from sr_assets.adapters.state.lock import lock_owner
from sr_assets.domain.errors import RunError
from sr_assets.settings import Settings
from sr_assets.settings.election import CheckpointSettings
from sr_assets.stages.checkpointing import described, export_state, open_store, store_state
from sr_assets.stages.site import Site

_POLL_SECONDS: Final = 0.1


def save_site(settings: Settings, site: str, file: Path | None) -> str:
    """Write a checkpoint of a site now, into a file or the store; return the result as a line."""
    store, folder = settings.checkpoint_store(site), settings.home / "sites" / site
    if file is None and store is None:
        raise RunError(f"{site}: no store is configured; set `checkpoint`, or name a file with -o")
    if store is not None and lock_owner(folder) is not None and _request(settings, site, store):
        if file is not None:
            with open_store(store) as bucket:
                bucket.get(settings.checkpoint_name(site), file)
        return f"{site}: the active run has stored a checkpoint"
    with Site(settings, site, owner="checkpoint", run_id="checkpoint") as opened:
        if file is not None:
            about = export_state(settings, site, opened.state, file)
            return f"{site}: wrote a checkpoint of {file.stat().st_size:,} bytes into {file}: {described(about)}"
        assert store is not None
        store_state(settings, store, site, opened.state, opened.leadership.ensure)
    return f"{site}: stored a checkpoint"


def _request(settings: Settings, site: str, store: CheckpointSettings) -> bool:
    """Let the active run store a checkpoint; return False if it ended before."""
    folder = settings.home / "sites" / site
    before = last_stored(folder)
    request_checkpoint(settings, site)
    while lock_owner(folder) is not None:
        if not is_pending(folder):
            if last_stored(folder) == before:
                raise RunError(f"{store.cluster}: the active run could not store a checkpoint; its log has the reason")
            return True
        times.sleep(_POLL_SECONDS)
    withdraw_request(folder)
    return last_stored(folder) != before
