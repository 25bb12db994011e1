"""The users of all connections, by server, with the permissions that each needs."""

import base64
import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from sr_assets.adapters.security import read_login
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.errors import RunError
from sr_assets.domain.permissions import Action
from sr_assets.settings.permissions import Permission

T = TypeVar("T")
Login = Literal["user", "nkey", "jwt", "token", "choria", "certificate", "none"]
#: The name of a user that the configuration does not name.
UNNAMED: Final = "sr-assets"


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
    """Return the users of all clusters."""
    return [user for users in clusters for user in users]
