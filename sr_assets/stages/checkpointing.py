"""Checkpoints of a site: stored during its runs, restored by a member whose home has no state or an older one."""

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final, NamedTuple, Self

from sr_assets.adapters import times
from sr_assets.adapters.nats.object_store import ObjectBucket, StoredObject
from sr_assets.adapters.private import own_folder
from sr_assets.adapters.progress_lines import LongWork
from sr_assets.adapters.state.checkpoint import (
    About,
    Stored,
    holds_digest,
    is_sealed,
    is_signed,
    last_seen,
    last_stored,
    note_seen,
    note_stored,
    read_about,
    read_description,
    read_positions,
    restore_checkpoint,
    sign,
    write_checkpoint,
)
from sr_assets.adapters.state.database import BrokenStateError
from sr_assets.adapters.state.lock import SiteLock
from sr_assets.adapters.state.operator_settings import (
    add_windows,
    added_windows,
    paused_streams,
    read_window,
    set_paused,
)
from sr_assets.adapters.state.orders import end_order, request_refill, take_order, withdraw_order
from sr_assets.adapters.state.status_file import outdate_status, read_status
from sr_assets.adapters.state.store import SiteState
from sr_assets.adapters.threads import BackgroundThread
from sr_assets.domain.errors import LeadershipLostError, RunError, SrAssetsError, cannot_write
from sr_assets.domain.foreign_text import visible
from sr_assets.domain.sizing import checkpoint_seconds
from sr_assets.settings import Settings, StreamSettings
from sr_assets.settings.election import CheckpointSettings
from sr_assets.stages.clock import Clock
from sr_assets.stages.leadership import Leadership

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 1.0
_LOCK_SECONDS: Final = 10.0
#: A line about a checkpoint names so many streams, each by so many letters.
_NAMES: Final = 3
_NAME_LETTERS: Final = 80
_UNSIGNED_REMEDY: Final = (
    "if you know who wrote it, run `sr-assets restore --unsigned`; else delete it, and the next run of a member with a state"
    " stores another one"
)


class Checkpoints:
    """Stores the state of a site while it is open: at most once per interval, and at the end, if it has changed.

    A large state is stored less often, so that its checkpoints take 1.5 % of a core at most.
    A context manager inside the site's lock. A failing store delays and stops nothing: it causes one warning per cause.
    """

    def __init__(self, settings: Settings, site: str, state: SiteState, leadership: Leadership) -> None:
        self._settings, self._site, self._leadership = settings, site, leadership
        self._folder = settings.home / "sites" / site
        self._store = settings.checkpoint_store(site)
        #: The last checkpoint of this home's state.
        self._stored = last_stored(self._folder)
        self._problem = ""
        self._stack = contextlib.ExitStack()
        if self._store is not None:
            # Another connection: writing a checkpoint delays no commit.
            self._state = self._stack.enter_context(state.second_connection())
            self._due_at = times.monotonic() + self._store.interval_ns / 1e9
            self._thread = BackgroundThread(f"checkpoints {site}", self._keep)

    def __enter__(self) -> Self:
        if self._store is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self._thread.stop()
            try:
                self._serve(self._store, due=not self._problem)
            except Exception:
                logger.exception("%s: unexpected error while storing a checkpoint", self._site)
            self._stack.close()

    def _keep(self) -> Generator[float]:
        assert self._store is not None
        while True:
            yield _POLL_SECONDS
            before = time.thread_time()
            if self._serve(self._store, due=times.monotonic() >= self._due_at):
                cost_seconds = time.thread_time() - before
                self._due_at = times.monotonic() + checkpoint_seconds(cost_seconds, self._store.interval_ns / 1e9)

    def _serve(self, store: CheckpointSettings, *, due: bool) -> bool:
        """Store a checkpoint if one is requested, or if one is due and the state has changed; return whether it was so."""
        requested = take_order(self._folder, "checkpoint")
        if requested or due:
            self._attempt(store, anyway=requested)
        end_order(self._folder, "checkpoint")
        return requested or due

    def _attempt(self, store: CheckpointSettings, *, anyway: bool) -> None:
        try:
            if anyway or _has_changed(self._state, self._stored):
                self._leadership.ensure()
                self._stored = store_state(self._settings, store, self._site, self._state, self._leadership.ensure)
                self._problem = ""
        except LeadershipLostError:
            return
        except SrAssetsError as error:
            self._note_problem(str(error))
        except OSError as error:
            self._note_problem(cannot_write(error.filename or self._folder, error))

    def _note_problem(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            logger.warning("%s: no checkpoint was stored: %s", self._site, problem)


def _has_changed(state: SiteState, stored: Stored | None) -> bool:
    """Return whether an open state, or the markers in its folder, have changed since a checkpoint."""
    return stored is None or (state.last_commit(), _markers(state.folder)) != (stored.commit, stored.markers)


def _markers(folder: Path) -> str:
    """Return a digest of what operators have set in a site's folder: paused streams and windows."""
    set_ = [sorted(paused_streams(folder)), [asdict(window) for window in added_windows(folder)]]
    return hashlib.sha256(json.dumps(set_).encode()).hexdigest()[:16]


def store_state(
    settings: Settings,
    store: CheckpointSettings,
    site: str,
    state: SiteState,
    guard: Callable[[], None] = lambda: None,
) -> Stored:
    """Write a checkpoint of an open state and store it. `guard` raises an error unless this home leads the site.

    Raises RunError if the store refuses it or does not respond, or holds a later checkpoint, or one of a stream that this
    state has never read: the state of a home that could not restore it.
    """
    folder = settings.home / "sites" / site
    name, file = settings.checkpoint_name(site), folder / "checkpoint.zip"
    before, markers = last_stored(folder), _markers(folder)
    if before is None or before.markers != markers:
        # So that this checkpoint is later than one with the same rows and other markers.
        state.note_change()
    # The checkpoint has at least this commit.
    commit = state.last_commit()
    try:
        about = export_state(settings, site, state, file)
        stored = Stored(about.at_ns, about.positions, commit, markers)

        def check(replaced: StoredObject | None) -> None:
            """Refuse to replace a checkpoint, directly before; another member stores one only after our lease has ended."""
            guard()
            if replaced is None or (other := read_description(replaced.description)) is None:
                return
            signed = not store.key or is_signed(store.key, name, other, replaced.description)
            if unread := _unread(settings, site, other.positions, stored.positions):
                raise RunError(
                    f"{site}: object store {store.bucket} holds a checkpoint of {', '.join(unread)}, and this home has no state"
                    " of it; the next run restores that checkpoint, or `sr-assets restore --unsigned` one without our signature"
                )
            # Whoever can write an unsigned one must not prevent ours.
            if signed and other.commit is not None and other.commit > commit:
                raise RunError(
                    f"{site}: object store {store.bucket} holds a later checkpoint ({described(other)}); it was not replaced"
                )

        with open_store(store) as bucket:
            check(bucket.find(name))
            bucket.put(name, file, sign(store.key, name, stored, file), check)
    finally:
        file.unlink(missing_ok=True)
    note_stored(folder, stored)
    if store.key:
        note_seen(folder, commit)
    return stored


def export_state(settings: Settings, site: str, state: SiteState, file: Path) -> About:
    """Write a checkpoint of an open state into a file, signed if the configuration has a key."""
    folder = settings.home / "sites" / site
    identities = {
        entry.stream: (entry.replicator, entry.name)
        for entry in settings.sites[site]
        if isinstance(entry, StreamSettings) and entry.tracked
    }
    with state.read_snapshot():
        return write_checkpoint(
            state.connection.raw,
            file,
            replicator=settings.replicator,
            site=site,
            # The servers' time, so that the clocks of hosts need not agree.
            at_ns=Clock(folder).now_ns(),
            identities=identities,
            paused=paused_streams(folder),
            maintenance=added_windows(folder),
            key=_key(settings),
            name=settings.checkpoint_name(site),
        )


class _Own(NamedTuple):
    """A home's state of a site: the next sequence of each stream that it has read, and the number of its last commit."""

    positions: dict[str, int]
    commit: int


def restore_newer(settings: Settings, site: str) -> None:
    """Restore the newest checkpoint of a site if this home has no state of a stream in it, or in an election if it has later
    commits: another member's. Call it inside the site's lock, before the state is opened.

    A store that does not respond, or an unusable checkpoint, causes a warning: the run continues from its own state.
    """
    store, folder = settings.checkpoint_store(site), settings.home / "sites" / site
    if store is None:
        return
    elected = any(entry.leader_election_name for entry in settings.sites[site])
    try:
        own = _read_own(folder)
        if own is not None and not elected and own.positions.keys() >= {entry.stream for entry in settings.sites[site]}:
            return
        newest = find_checkpoint(settings, site)
        if newest is None or (own is not None and not _is_ahead(settings, site, newest, own, elected=elected)):
            return
        about, aside = _restore_stored(settings, store, site)
    except RunError as error:
        logger.warning("%s: no checkpoint was restored: %s", site, error)
        return
    kept = f"; the previous state is kept as {aside}" if aside else ""
    logger.warning("%s: restored the checkpoint of %s%s", site, described(about), kept)
    if problem := settings.unsigned_checkpoints(site):
        logger.warning("%s", problem)


def _read_own(folder: Path) -> _Own | None:
    """Return what this home's state holds, or None without one; of a damaged state, what the last publication said.

    Raises RunError if the state is intact and cannot be opened now.
    """
    if not (folder / "state.duckdb").exists():
        return None
    try:
        with SiteState(folder) as state:
            return _Own(read_positions(state.connection.raw), state.last_commit())
    except BrokenStateError:
        status = read_status(folder)
        positions = {stream: row.next_sequence for stream, row in status.streams.items() if row.begun}
        return _Own(positions, status.committed_at_ns)


def _is_ahead(settings: Settings, site: str, newest: Stored, own: _Own, *, elected: bool) -> bool:
    """Return whether a checkpoint holds a configured stream that this home's state lacks, or in an election is later."""
    if _unread(settings, site, newest.positions, own.positions):
        return True
    if _unread(settings, site, own.positions, newest.positions):
        # A member that lacked this home's state has stored it. This state finds what that member has done.
        return False
    if newest.commit is not None:
        return elected and newest.commit > own.commit
    read_more = any(
        newest.positions.get(entry.stream, 0) > own.positions.get(entry.stream, 0) for entry in settings.sites[site]
    )
    return elected and newest.at_ns > own.commit and read_more


def _unread(settings: Settings, site: str, stored: Mapping[str, int], positions: Mapping[str, int]) -> list[str]:
    """Return the configured streams of a checkpoint, or a state, that are not among other positions."""
    return [entry.stream for entry in settings.sites[site] if entry.stream in stored.keys() - positions.keys()]


def find_checkpoint(settings: Settings, site: str) -> Stored | None:
    """Return the newest stored checkpoint of a site, or None. Raises RunError if the store does not respond."""
    store = settings.checkpoint_store(site)
    if store is None:
        return None
    with open_store(store) as bucket:
        held = bucket.find(settings.checkpoint_name(site))
    return None if held is None else _accepted(settings, store, site, held)


def _accepted(
    settings: Settings, store: CheckpointSettings, site: str, held: StoredObject, *, unsigned: bool = False
) -> Stored | None:
    """Return the checkpoint that an object's description names, or None if it names none.

    With a key, raises RunError unless a member has signed it, and if this home knows a later signed one.
    """
    stored = read_description(held.description)
    if stored is None or not store.key or unsigned:
        return stored
    where, name = f"{site}: object store {store.bucket}", settings.checkpoint_name(site)
    if not is_signed(store.key, name, stored, held.description):
        raise RunError(f"{where}: {name} has no signature of checkpoint.key; {_UNSIGNED_REMEDY}")
    if (stored.commit or 0) < last_seen(settings.home / "sites" / site):
        raise RunError(
            f"{where}: {name} is an earlier checkpoint ({described(stored)}) than this home knows; {_UNSIGNED_REMEDY}"
        )
    return stored


def restore_site(settings: Settings, site: str, file: Path | None, *, unsigned: bool = False) -> str:
    """Replace a site's state by a checkpoint, from a file or the newest in the store; return the result as a line.

    With a key of the members, refuse one without their signature unless `unsigned`. Raises RunError, and leaves the state as it
    is, if there is no usable checkpoint or a run holds the site.
    """
    folder = settings.home / "sites" / site
    own_folder(folder)
    with SiteLock(folder, "restore", _LOCK_SECONDS):
        if file is not None:
            about, aside = _restore(settings, site, file, unsigned=unsigned)
        else:
            store = settings.checkpoint_store(site)
            if store is None:
                raise RunError(f"{site}: no store is configured; set `checkpoint`, or name a file")
            about, aside = _restore_stored(settings, store, site, unsigned=unsigned)
        withdraw_order(folder, "yield")
        _outrank_stored(settings, site)
    kept = f"; the previous state is kept as {aside}" if aside else ""
    return f"{site}: restored the checkpoint of {described(about)}{kept}"


def _outrank_stored(settings: Settings, site: str) -> None:
    """Let a state that an operator chose count as later than the stored checkpoint, which the next run would restore."""
    folder = settings.home / "sites" / site
    try:
        newest = find_checkpoint(settings, site)
        after = 0 if newest is None else newest.commit or newest.at_ns
    except RunError:
        after = Clock(folder).now_ns()
    with SiteState(folder) as state:
        state.note_change(after=after)


def _restore_stored(
    settings: Settings, store: CheckpointSettings, site: str, *, unsigned: bool = False
) -> tuple[About, Path | None]:
    folder = settings.home / "sites" / site
    own_folder(folder)
    file = folder / "checkpoint.zip"
    try:
        fetch_checkpoint(settings, store, site, file, unsigned=unsigned)
        return _restore(settings, site, file, unsigned=unsigned)
    finally:
        file.unlink(missing_ok=True)


def fetch_checkpoint(
    settings: Settings, store: CheckpointSettings, site: str, file: Path, *, unsigned: bool = False
) -> None:
    """Write a site's newest checkpoint into a file; raises RunError if the store holds no usable one or does not respond."""
    name = settings.checkpoint_name(site)
    with open_store(store) as bucket:
        # Before the content, which a forger may make large.
        if (held := bucket.find(name)) is not None:
            _accepted(settings, store, site, held, unsigned=unsigned)
            held = bucket.get(name, file)
    if held is None:
        raise RunError(f"{site}: object store {store.bucket} holds no checkpoint of it")
    stored = _accepted(settings, store, site, held, unsigned=unsigned)
    if store.key and not unsigned:
        if stored is None or not holds_digest(file, held.description):
            raise RunError(
                f"{site}: object store {store.bucket}: the content is not the signed one; {_UNSIGNED_REMEDY}"
            )
        note_seen(settings.home / "sites" / site, stored.commit or 0)


def read_checkpoint(settings: Settings, site: str, file: Path, *, unsigned: bool = False) -> About:
    """Return the origin of a site's checkpoint in a file; raises RunError, one line, unless it is usable and signed."""
    key = _key(settings)
    if key and not unsigned and not is_sealed(file, key, settings.checkpoint_name(site)):
        raise RunError(
            f"{file}: has no signature of checkpoint.key; if you know who wrote it, run `sr-assets restore --unsigned`"
        )
    return read_about(file, settings.replicator, site)


def _key(settings: Settings) -> str:
    return settings.checkpoint.key if settings.checkpoint else ""


def _restore(settings: Settings, site: str, file: Path, *, unsigned: bool = False) -> tuple[About, Path | None]:
    with LongWork(f"{site}: verifying the checkpoint"):
        about = read_checkpoint(settings, site, file, unsigned=unsigned)
    folder = settings.home / "sites" / site
    aside = restore_checkpoint(file, about, folder, settings.home.resolve())
    outdate_status(folder)
    add_windows(folder, map(read_window, about.maintenance))
    for entry in settings.sites[site]:
        if isinstance(entry, StreamSettings):
            set_paused(settings, entry, entry.stream in about.paused)
            request_refill(folder, entry)
    return about, aside


def described(about: About | Stored) -> str:
    """Return the time and the positions of a checkpoint."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(about.at_ns / 1e9))
    return f"{at} ({described_positions(about.positions, ' at ')})"


def described_positions(positions: Mapping[str, int], is_at: str) -> str:
    """Return the first positions of a checkpoint as one short line: whoever may write to the store chooses them."""
    names = sorted(positions)
    shown = [f"{visible(name[:_NAME_LETTERS])}{is_at}{positions[name]}" for name in names[:_NAMES]]
    more = f" and {len(names) - _NAMES:,} more" if len(names) > _NAMES else ""
    return ", ".join(shown) + more


def open_store(store: CheckpointSettings) -> ObjectBucket:
    """Return the object store, to be opened by `with`."""
    assert not isinstance(store.cluster, str)  # `checkpoint_store` has replaced it by an address
    return ObjectBucket(store.cluster, store.bucket)
