"""The permissions as blocks of a nats-server's configuration, as `nsc` commands, and as rows."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from sr_assets.domain.clusters import OWN_API
from sr_assets.domain.permissions import Action
from sr_assets.settings.permissions import Permission, trusted_subjects
from sr_assets.stages.permissions.users import User

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
