"""Comparison of the needed permissions with the permissions of the configured users."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from sr_assets.adapters.wire import WireError, find_denied
from sr_assets.domain.errors import RunError, SrAssetsError
from sr_assets.domain.permissions import USER_INFO, Action
from sr_assets.settings import Settings
from sr_assets.settings.permissions import Permission, needed_permissions
from sr_assets.stages.permissions.facts import ask_servers
from sr_assets.stages.permissions.users import User, all_users, list_users
from sr_assets.stages.probes import Probe

_SIDE_BY_SIDE: Final = 16
_REMEDY: Final = "grant it as `sr-assets permissions` prints it"


class Comparison(NamedTuple):
    """A user with the needed permissions that it lacks; with an `error`, its server did not say."""

    user: User
    missing: tuple[Permission, ...] = ()
    error: str | None = None

    def granted(self, need: Permission) -> bool | None:
        """Return whether the user has a permission; None if this is unknown, or a matter of its account."""
        if self.error is not None or need.problem or need.action is Action.IMPORT:
            return None
        return (need.action, need.subject) not in {(missing.action, missing.subject) for missing in self.missing}

    @property
    def problems(self) -> list[str]:
        """One line for each missing permission."""
        if self.error is not None:
            return [f"{self.user.url}: user {self.user.name}: the permissions are unknown: {self.error}"]
        return [missing_text(self.user, need) for need in self.missing]


def missing_text(user: User, need: Permission) -> str:
    """Return one line about a missing permission, with the remedy."""
    lacking = (
        f"{need.role} {need.about}: user {user.name} at {','.join(user.servers)} may not {need.action} {need.subject}"
    )
    return f"{lacking}, to {need.purpose}; {_REMEDY}"


def compare_permissions(users: Sequence[User]) -> list[Comparison]:
    """Ask each user's server for the user's permissions, in parallel."""
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        return list(pool.map(_compare, users))


def _compare(user: User) -> Comparison:
    needs = {
        (action, subject): need
        for action in (Action.PUBLISH, Action.SUBSCRIBE)
        for subject, need in user.subjects(action).items()
        # A Choria broker permits the inbox of each token, and no pattern of all of them.
        if not (action is Action.SUBSCRIBE and need.cluster.choria)
    }
    try:
        denied = find_denied(user.clusters[0], list(needs))
    except (WireError, RunError) as error:
        return Comparison(user, error=str(error))
    return Comparison(user, tuple(need for key, need in needs.items() if key in denied))


def probe_permissions(settings: Settings) -> list[Probe]:
    """Return a probe for each user, or for each permission that it lacks, for `check --connect`.

    The other probes report a server that does not respond.
    """
    made = []
    for comparison in _compare_all(settings):
        user = comparison.user
        label, count = ",".join(user.servers), len({need.subject for need in user.needs})
        if not comparison.missing and comparison.error is None:
            made.append(Probe(f"user {user.name}", label, "permissions", works=True, learned=f"has all {count}"))
        for need in comparison.missing:
            tried, learned, works = f"{need.action} {need.subject}", missing_text(user, need), False
            if need.subject == USER_INFO:
                # A Choria broker grants it to no token, and no work needs it.
                learned, works = f"user {user.name} may not read its own permissions; the other probes decide", True
            made.append(Probe(need.about, label, tried, works, learned))
    return made


def _compare_all(settings: Settings) -> list[Comparison]:
    needs = needed_permissions(settings, ask_servers(settings))
    return compare_permissions(all_users(list_users(needs)))


@contextmanager
def reporting_missing(settings: Settings, report: Callable[[str], None]) -> Iterator[None]:
    """Report a line for each missing permission, from a thread, while the block runs."""

    def warn() -> None:
        # The sites' runs report an unreachable server and an unreadable credential.
        with suppress(SrAssetsError):
            for comparison in _compare_all(settings):
                for need in comparison.missing:
                    report(missing_text(comparison.user, need))

    checking = threading.Thread(target=warn, name="permissions", daemon=True)
    checking.start()
    try:
        yield
    finally:
        checking.join()
