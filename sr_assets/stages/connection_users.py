"""The permissions of each connection's user: unknown subjects from the servers, users, output formats, and the check."""

import base64
import json
import shlex
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeVar

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.security import read_login
from sr_assets.adapters.wire import PermissionProbe, WireError, find_denied
from sr_assets.domain.clusters import OWN_API, ClusterSettings
from sr_assets.domain.errors import RunError, SrAssetsError
from sr_assets.domain.permissions import USER_INFO, Action, Facts, StreamFacts
from sr_assets.domain.subjects import advisory_pattern
from sr_assets.settings import Entry, Settings, StreamSettings
from sr_assets.settings.needed_permissions import (
    Permission,
    configured_copies,
    needed_permissions,
    trusted_subjects,
    used_clusters,
)
from sr_assets.stages.probes import Probe
from sr_assets.stages.replication.target_setup import copied_subjects

_CLIENT: Final = "sr-assets permissions"
_SIDE_BY_SIDE: Final = 16
T = TypeVar("T")
Login = Literal["user", "nkey", "jwt", "token", "choria", "certificate", "none"]
#: The name of a user that the configuration does not name.
UNNAMED: Final = "sr-assets"
#: A server refuses its configuration until this variable is set or replaced.
PASSWORD: Final = "$SR_ASSETS_PASSWORD"  # noqa: S105  a placeholder
_REMARKS: Final[Mapping[str, str]] = {
    "none": "the configuration has no login: add user and password to the URL",
    "token": "a token has no permissions of its own: use user and password in the URL",
    "choria": "a Choria broker derives the permissions from the token; this user is for another server",
    "certificate": "with verify_and_map, the user is the certificate's subject or alternative name: replace the path",
    "jwt": "the permissions of this user are in its JWT: use --format nsc",
}
_NSC: Final = {Action.PUBLISH: "--allow-pub", Action.SUBSCRIBE: "--allow-sub"}
_REMEDY: Final = "grant it as `sr-assets permissions` prints it"


def ask_servers(settings: Settings, entries: Iterable[Entry] | None = None) -> Facts:
    """Return what the servers know; a server that does not respond leaves it unknown."""
    chosen = settings.entries if entries is None else entries
    streams = [entry for entry in chosen if isinstance(entry, StreamSettings)]
    clusters = [cluster for cluster in used_clusters(settings) if cluster.domain]
    with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
        domains = dict(zip(clusters, pool.map(_domain, clusters), strict=True))
        answers = pool.map(partial(_facts, settings), streams)
        facts = dict(zip([stream.label for stream in streams], answers, strict=True))
    return Facts(facts, {cluster: domain for cluster, domain in domains.items() if domain is not None})


def _domain(cluster: ClusterSettings) -> str | None:
    """Return the JetStream domain of the connected server, empty without one, or None if no server responds."""
    with suppress(SrAssetsError), PermissionProbe(cluster) as connection:
        return connection.server_domain
    return None


def _facts(settings: Settings, stream: StreamSettings) -> StreamFacts:
    with (
        closing(Cluster(stream.source, _CLIENT)) as source,
        closing(Cluster(stream.target, _CLIENT)) as target,
    ):
        copies = keepers = None
        origins: tuple[str, ...] = ()
        if configured_copies(settings, stream) is None:
            with suppress(SrAssetsError):
                info = source.stream_info(stream.stream)
                origins = _origins(info)
                copies = copied_subjects(stream, info, source, target)
        if stream.advisory is not None:
            with suppress(SrAssetsError):
                cluster = source if stream.advisory.cluster == "source" else target
                keepers = tuple(cluster.stream_names(advisory_pattern(stream.advisory.subject)))
        return StreamFacts(copies, keepers, origins)


def _origins(info: StreamInfo) -> tuple[str, ...]:
    """Return the streams of the same JetStream that a run queries for the subjects of a mirror or a stream with sources."""
    upstreams = [info.config.get("mirror"), *(info.config.get("sources") or ())]
    return tuple(origin["name"] for origin in upstreams if origin and not origin.get("external"))


@dataclass(frozen=True, slots=True)
class User:
    """A user of one cluster; `login` is the kind of its login, `clusters` are its connections."""

    name: str
    login: Login
    clusters: tuple[ClusterSettings, ...]
    needs: tuple[Permission, ...]

    @property
    def url(self) -> str:
        """The cluster's URL without the login."""
        return ",".join(f"{'tls' if self.clusters[0].tls else 'nats'}://{server}" for server in self.servers)

    @property
    def servers(self) -> tuple[str, ...]:
        """All configured servers of the cluster."""
        return tuple(dict.fromkeys(server for cluster in self.clusters for server in cluster.servers))

    def subjects(self, action: Action) -> dict[str, Permission]:
        """Return the known subjects of an action, each with the first need for it."""
        chosen: dict[str, Permission] = {}
        for need in self.needs:
            if need.action is action and not need.problem:
                chosen.setdefault(need.subject, need)
        return chosen

    @property
    def unknown(self) -> list[Permission]:
        """The permissions whose subjects only the servers know."""
        return [need for need in self.needs if need.problem]


def list_users(needs: Iterable[Permission]) -> list[list[User]]:
    """Return the users of each cluster; connections with a common server belong to the same cluster."""
    by_connection: dict[ClusterSettings, list[Permission]] = {}
    for need in needs:
        by_connection.setdefault(need.cluster, []).append(need)
    users = [
        User(
            *_name(clusters[0]), tuple(clusters), tuple(need for cluster in clusters for need in by_connection[cluster])
        )
        for clusters in _joined(by_connection, lambda cluster: cluster.logins)
    ]
    return _joined(users, lambda user: frozenset().union(*(cluster.addresses for cluster in user.clusters)))


def _joined(items: Iterable[T], keys: Callable[[T], Iterable[Hashable]]) -> list[list[T]]:
    """Return the items in groups that share keys, in their order."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        known = {id(groups[key]): groups[key] for key in keys(item) if key in groups}
        group = [member for members in known.values() for member in members] + [item]
        groups |= {key: group for member in group for key in keys(member)}
    return list({id(group): group for group in groups.values()}.values())


def _name(cluster: ClusterSettings) -> tuple[str, Login]:
    """Return a user's name at its server, and the kind of its login."""
    if cluster.choria:
        return UNNAMED, "choria"
    if cluster.user:
        return cluster.user, "user"
    if cluster.token:
        return UNNAMED, "token"
    with suppress(RunError):
        if cluster.credentials or cluster.jwt:
            return _claimed_name(read_login(cluster).jwt or ""), "jwt"
        if cluster.nkey and (pair := read_login(cluster).pair):
            return pair.public_key.decode(), "nkey"
    if file := cluster.credentials or cluster.jwt:
        return file, "jwt"
    if cluster.nkey:
        return cluster.nkey, "nkey"
    return (cluster.tls.cert, "certificate") if cluster.tls and cluster.tls.cert else (UNNAMED, "none")


def _claimed_name(jwt: str) -> str:
    """Return the name in a user's JWT; raises RunError if there is none."""
    try:
        claims = jwt.split(".")[1]
        return str(json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["name"])
    except (IndexError, KeyError, ValueError, TypeError):
        raise RunError("no name") from None


def all_users(clusters: Sequence[Sequence[User]]) -> list[User]:
    return [user for users in clusters for user in users]


def nats_blocks(clusters: Sequence[Sequence[User]], passwords: Mapping[str, str] | None = None) -> str:
    """Return an `authorization` block for each cluster, for the configuration of its servers.

    `passwords` of users replace the placeholder.
    """
    return "\n".join(line for users in clusters for line in _block(users, passwords or {})) + "\n"


def _block(users: Sequence[User], passwords: Mapping[str, str]) -> Iterator[str]:
    for user in users:
        yield from _header(user)
    yield "authorization {"
    yield "  users = ["
    for user in users:
        yield "    {"
        yield from (f"      {line}" for line in _user(user, passwords))
        yield "    }"
    yield "  ]"
    yield "}"
    yield ""


def _user(user: User, passwords: Mapping[str, str]) -> Iterator[str]:
    if user.login in ("nkey", "jwt"):
        yield f"nkey: {json.dumps(user.name)}"
    else:
        yield f"user: {json.dumps(user.name)}"
        if user.login != "certificate":
            yield f"password: {json.dumps(passwords[user.name]) if user.name in passwords else PASSWORD}"
    yield "permissions: {"
    for action in (Action.PUBLISH, Action.SUBSCRIBE):
        yield f"  {action}: {{"
        yield "    allow: ["
        yield from (f"      {line}" for line in _lines(user.subjects(action)))
        yield "    ]"
        yield "  }"
    yield "}"


def _lines(subjects: Mapping[str, Permission]) -> Iterator[str]:
    title = ""
    for subject, need in subjects.items():
        if (role := f"{need.role} {need.about}") != title:
            title = role
            yield f"# {title}"
        yield f"{json.dumps(subject)}  # {need.purpose}"


def _header(user: User) -> Iterator[str]:
    """Yield the comments about a user: cluster, roles, remarks, imports, and unknown subjects."""
    roles = ", ".join(dict.fromkeys(need.role for need in user.needs))
    yield f"# {user.url} user {user.name}: {roles}"
    if user.login in _REMARKS:
        yield f"# {_REMARKS[user.login]}"
    for subject, need in user.subjects(Action.IMPORT).items():
        yield f"# the account of {user.name} needs {subject} to {need.purpose}"
    if trusted := trusted_subjects(user.subjects(Action.PUBLISH).values()):
        yield "# only members of the election may publish to the subjects below: a writer can replace a site's state or leader"
        yield from (f"#   {subject}" for subject in trusted)
    for need in user.unknown:
        yield f"# UNKNOWN: {need.role} {need.about}: {unknown_text(need)}"


def unknown_text(need: Permission) -> str:
    """Return why a subject is unknown, and the remedy."""
    return f"{need.purpose}: {need.problem}, or run this command again when the servers respond to the user"


def nsc_commands(clusters: Sequence[Sequence[User]]) -> str:
    """Return commands that add the permissions to users of `nsc`."""
    return "\n".join(line for users in clusters for user in users for line in _commands(user)) + "\n"


def _commands(user: User) -> Iterator[str]:
    yield from _header(user)
    name = shlex.quote(user.name)
    for cluster in user.clusters:
        if cluster.api_prefix != OWN_API and cluster.domain is None:
            subjects = f"--remote-subject '$JS.API.>' --local-subject {shlex.quote(cluster.api('>'))}"
            yield f'nsc add import --service --src-account "$EXPORTING_ACCOUNT" {subjects}'
    for action, option in _NSC.items():
        for subject, need in user.subjects(action).items():
            yield f"nsc edit user --name {name} {option} {shlex.quote(subject)}  # {need.role}: {need.purpose}"
    yield ""


def row(user: User, need: Permission) -> dict[str, Any]:
    """Return one permission as a row; without a subject, `problem` is the reason."""
    return {
        "cluster": ",".join(user.servers),
        "url": user.url,
        "user": user.name,
        "role": need.role,
        "stream": need.about,
        "action": str(need.action),
        "subject": need.subject or None,
        "purpose": need.purpose,
        "problem": need.problem or None,
    }


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
