"""Leadership of a site's run: one process of this home campaigns, all its processes obey the lease; and all members of a site.

Without an election, this home always leads.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Self

from sr_assets.adapters import times
from sr_assets.adapters.lease_bucket import LeaseBucket, sound_name
from sr_assets.adapters.locking import lock
from sr_assets.adapters.private import open_private, own_folder
from sr_assets.adapters.published.fleet_file import show_leaders
from sr_assets.adapters.state.lease import Lease, forget_lease, guard_of, lease_age_seconds
from sr_assets.adapters.state.lock import lock_owner
from sr_assets.adapters.state.orders import end_order, give_order, is_new, is_pending, take_order
from sr_assets.adapters.threads import BackgroundThread
from sr_assets.domain.durations import duration
from sr_assets.domain.errors import RunError, StandbyError, TransientError, cannot_write
from sr_assets.stages.campaign import Candidate, Key, election_keys

if TYPE_CHECKING:
    from sr_assets.settings import Settings

logger = logging.getLogger(__name__)

_LOCK: Final = "election.lock"
_POLL_SECONDS: Final = 0.1
#: A member whose campaign has failed by a defect or a full disk tries again within a usual TTL.
_LONGEST_PAUSE_SECONDS: Final = 5.0
#: A campaign leaves a result every second or two, except while the last lease holds and the servers do not respond.
_STALLED_SECONDS: Final = 30.0
#: A reader is no member: it writes no key.
_READER: Final = "reader"


class Leadership:
    """This home's part in the election of one site, as a context manager.

    Inside it, a thread campaigns and renews, unless another process of this home already does. Its end releases the
    leadership, so all work must have ended before. Entering raises RunError for an unusable bucket; with `patient`, an
    unreachable server is only logged. `keys` are those of the site's entries unless given; `locks` must be held too.
    """

    def __init__(
        self, settings: Settings, site: str, *, patient: bool = False, keys: Sequence[Key] | None = None
    ) -> None:
        self._settings, self._site, self._patient = settings, site, patient
        self._folder = settings.home / "sites" / site
        self._keys = election_keys(settings, site) if keys is None else keys
        self._elects = bool(self._keys)
        # The published tables have no locks.
        self._shows = not any(key.label for key in self._keys)
        self._guard = guard_of(self._folder)
        self._candidate: Candidate | None = None
        self._failing_since: float | None = None
        self._logged = ""
        self._showing: threading.Thread | None = None
        self.locks: Leadership | None = None

    def __enter__(self) -> Self:
        self.begin()
        return self

    def begin(self) -> None:
        """Campaign, unless a process of this home already does; call it again to replace one that has ended."""
        if not self._elects:
            forget_lease(self._folder)
        if not self._elects or self.campaigns:
            return
        own_folder(self._folder)
        self._file: IO[str] = open_private(self._folder / _LOCK)
        # A reader locks the file for a moment.
        if not lock(self._file, _POLL_SECONDS):
            self._file.close()
            return
        candidate = None
        try:
            candidate = Candidate(self._settings, self._site, self._keys)
            try:
                self._campaign(candidate)
            except (TransientError, OSError) as error:
                if not self._patient:
                    raise
                self._note_problem(candidate, error)
            self._thread = BackgroundThread(
                f"election {self._site}",
                lambda: self._campaign_on(candidate),
                longest_pause_seconds=_LONGEST_PAUSE_SECONDS,
            )
            self._thread.start()
        except Exception as error:
            if candidate is not None:
                candidate.stop(str(error))
                candidate.close()
            self._file.close()
            raise
        self._candidate = candidate

    def __exit__(self, *_: object) -> None:
        if self._candidate is None:
            return
        self._thread.stop()
        self._candidate.stop("this member ended")
        self._candidate.release()
        if self._showing is not None:
            self._showing.join()
        self._candidate.close()
        self._file.close()
        self._candidate = None

    @property
    def elects(self) -> bool:
        """Whether the site has an election."""
        return self._elects

    @property
    def campaigns(self) -> bool:
        """Whether this process campaigns, and not another one of this home."""
        return self._candidate is not None

    @property
    def leads(self) -> bool:
        """Whether this home leads the site now."""
        return (not self._elects or self.lease.holds) and (self.locks is None or self.locks.leads)

    @property
    def is_new(self) -> bool:
        """Whether copies of a previous leader may still arrive: this home has led for less than two TTLs."""
        lease = self.lease
        return self._elects and times.time_ns() - (lease.since_ns or 0) < 2 * lease.ttl_seconds * 1e9

    @property
    def lease(self) -> Lease:
        """The result of the last campaign of this home."""
        return Lease.read(self._folder)

    @property
    def lease_folders(self) -> tuple[Path, ...]:
        """The folders of the leases for tasks of this machine: of an election, and of locks."""
        return (*((self._folder,) if self._elects else ()), *(self.locks.lease_folders if self.locks else ()))

    @property
    def vanished_ms(self) -> int | None:
        """How long sent data may stay unacknowledged by a server: at most a TTL; None without an election and locks."""
        leases = [Lease.read(folder).ttl_seconds for folder in self.lease_folders]
        return math.floor(min(leases, default=0) * 1000) or None

    def ensure(self) -> None:
        """Raise LeadershipLostError unless this home leads now."""
        if self._elects:
            self._guard()
        if self.locks is not None:
            self.locks.ensure()

    def require(self) -> None:
        """Wait while this member holds the keys but its predecessor may still work.

        Raises StandbyError if another member leads or the campaigns fail.
        """
        while not self.leads:
            if self._candidate is None or not self._candidate.holds_keys or self._failing_since is not None:
                # The lease may be the one from before the last campaign.
                if self.leads:
                    return
                raise StandbyError(self.lease.line)
            times.sleep(_POLL_SECONDS)

    # ------------------------------------------------------------------------------------------------- the campaigns

    def _campaign_on(self, candidate: Candidate) -> Generator[float]:
        while True:
            yield candidate.pause_seconds * random.uniform(0.5, 1.5)  # noqa: S311  jitter
            try:
                self._campaign(candidate)
            except RunError as error:
                self._note_problem(candidate, error)
            except Exception as error:
                self._note_problem(candidate, error)
                raise

    def _campaign(self, candidate: Candidate) -> None:
        if take_order(self._folder, "step down"):
            if candidate.holds_keys:
                self._step_down(candidate)
            end_order(self._folder, "step down")
        rests = self._yields(candidate) or times.boot_seconds() < self.lease.rests_until
        self._log((candidate.observe() if rests else candidate.campaign()).line)
        self._failing_since = None

    def _yields(self, candidate: Candidate) -> bool:
        """Step down if this home lacks the site's state; return whether another member, which may have it, must lead."""
        if not is_pending(self._folder, "yield"):
            return False
        if (heirs := candidate.heirs()) and candidate.holds_keys and is_new(self._folder, "yield"):
            may_lead = " or ".join(heirs)
            logger.warning("%s: this member lacks the site's state and steps down: %s may lead", self._site, may_lead)
            self._step_down(candidate)
        if not candidate.holds_keys and is_new(self._folder, "yield"):
            # The next term may find a checkpoint.
            take_order(self._folder, "yield")
        return bool(heirs) and not candidate.holds_keys

    def _step_down(self, candidate: Candidate) -> None:
        """Stop the site's work, then delete the keys; a run that does not stop in time loses its lease first."""
        deadline = self.lease.deadline
        candidate.stop("this member steps down")
        while lock_owner(self._folder) is not None and times.boot_seconds() < deadline:
            times.sleep(_POLL_SECONDS)
        candidate.release(rest=True)

    def _note_problem(self, candidate: Candidate, error: Exception) -> None:
        self._failing_since = self._failing_since or times.time()
        # A connection that a server has dropped may look alive.
        candidate.close()
        problem = cannot_write(error.filename or self._folder, error) if isinstance(error, OSError) else str(error)
        self._log(problem)
        if not self.lease.holds:
            candidate.stop(problem, self._failing_since)
            if isinstance(error, OSError):
                # Other members may have space for a lease.
                candidate.release()

    def _log(self, line: str) -> None:
        if line != self._logged:
            self._logged = line
            logger.info("%s: %s", self._site, line)
            if self._shows:
                self._show()

    def _show(self) -> None:
        """Show the leader in the published tables."""
        # In another thread: a publication may hold the file's lock for longer than a lease lasts.
        shown = (self._settings.home, self._settings.sites)
        showing = threading.Thread(target=show_leaders, args=shown, name="leaders", daemon=True)
        with contextlib.suppress(RuntimeError):  # too many threads: the next publication shows the leader too
            showing.start()
            self._showing = showing


@contextlib.contextmanager
def lead_all(settings: Settings) -> Iterator[None]:
    """Campaign for all sites with an election inside the block, also in place of another process of this home that ends."""
    with contextlib.ExitStack() as stack:
        members = [stack.enter_context(Leadership(settings, site, patient=True)) for site in settings.sites]

        def begin() -> Generator[float]:
            while True:
                yield _LONGEST_PAUSE_SECONDS
                for each in members:
                    each.begin()

        if any(each.elects for each in members):
            stack.enter_context(BackgroundThread("elections", begin))
        yield


def standby_line(settings: Settings, site: str) -> str | None:
    """Return the line about the leader if a process of this home campaigns for the site and does not lead, else None."""
    folder = settings.home / "sites" / site
    if not election_keys(settings, site) or not campaigns_here(folder):
        return None
    lease = Lease.read(folder)
    return None if lease.holds else lease.line


def stalled_line(settings: Settings, site: str) -> str | None:
    """Return why a process of this home that campaigns for the site makes no progress, or None if it does."""
    folder = settings.home / "sites" / site
    if not election_keys(settings, site) or not campaigns_here(folder):
        return None
    age_seconds = lease_age_seconds(folder)
    if age_seconds is None:
        return "does not campaign: its lease cannot be written, see the log"
    lease = Lease.read(folder)
    patience_seconds = max(_STALLED_SECONDS, 2 * lease.ttl_seconds)
    if age_seconds > patience_seconds:
        return f"does not campaign: the last result is {duration(int(age_seconds))} old, see the log"
    if lease.failing_since is not None and (failing_seconds := times.time() - lease.failing_since) > patience_seconds:
        return f"cannot campaign for {duration(int(failing_seconds))}: {lease.problem}"
    return None


def campaigns_here(folder: Path) -> bool:
    """Return whether a process of this home campaigns for a site."""
    try:
        with (folder / _LOCK).open() as handle:
            return not lock(handle, shared=True)
    except FileNotFoundError:
        return False


def step_down(settings: Settings, site: str, wait_seconds: float) -> bool:
    """Give up the leadership of a site and do not campaign for two TTLs; return False if this home does not lead.

    Raises RunError if the process that campaigns does not respond in time.
    """
    folder = settings.home / "sites" / site
    lease = Lease.read(folder)
    if not lease.holds:
        return False
    own_folder(folder)
    with open_private(folder / _LOCK) as file:
        if lock(file):
            # Its process was killed: the keys are still ours.
            candidate = Candidate(settings, site, election_keys(settings, site))
            candidate.stop("this member steps down")
            candidate.observe()
            candidate.release(rest=True)
            candidate.close()
            return True
    give_order(folder, "step down")
    wait_seconds += lease.ttl_seconds
    deadline = times.monotonic() + wait_seconds
    while is_pending(folder, "step down"):
        if times.monotonic() > deadline:
            raise RunError(f"{site}: the running process did not step down within {wait_seconds:g} s")
        times.sleep(_POLL_SECONDS)
    return True


@dataclass(frozen=True, slots=True)
class SiteMembers:
    """A site's leader, the start of its term (unix ns), and the names of the followers.

    All are unknown without an election; `leader_host` also for a Stream Replicator. `since_ns` of a Stream Replicator is
    when this home first saw it lead. `problem` is why the election could not be read.
    """

    name: str
    leader: str | None = None
    leader_host: str | None = None
    since_ns: int | None = None
    followers: tuple[str, ...] = ()
    problem: str | None = None


def find_members(settings: Settings) -> list[SiteMembers]:
    """Query the elections of all sites."""
    return [_members(settings, site) for site in settings.sites]


def _members(settings: Settings, site: str) -> SiteMembers:
    keys = election_keys(settings, site)
    if not keys:
        return SiteMembers(site)
    bucket = LeaseBucket(keys[0].cluster, settings.leader_election.bucket, _READER, creates=False)
    try:
        with contextlib.closing(bucket):
            if not bucket.exists():
                return SiteMembers(site)
            records, entry = bucket.records(site), bucket.read(keys[0].key)
    except RunError as error:
        return SiteMembers(site, problem=str(error))
    leading = {instance: record for instance, record in records.items() if record.get("role") == "leader"}
    followers = tuple(sorted(str(records[instance].get("member")) for instance in records.keys() - leading.keys()))
    if entry is None or entry.deleted:
        return SiteMembers(site, followers=followers)
    name = sound_name(entry.value)
    if entry.instance is None:
        lease = Lease.read(settings.home / "sites" / site)
        since_ns = lease.since_ns if (lease.leader, lease.leader_host) == (name, None) else entry.stored_ns
        return SiteMembers(site, name, None, since_ns, followers)
    if (record := leading.get(entry.instance)) is None:
        return SiteMembers(site, followers=followers)
    return SiteMembers(site, name, record.get("host"), record.get("since_ns"), followers)
