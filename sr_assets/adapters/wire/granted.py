"""The permissions that a user has at a server: by its own account of them, or by probes that deliver no message."""

import contextlib
import re
from collections.abc import Sequence
from typing import Any, Final

from sr_assets.adapters import times
from sr_assets.adapters.jetstream import decode_response
from sr_assets.adapters.wire import frames as f
from sr_assets.adapters.wire.connection import Connection
from sr_assets.domain.clusters import ClusterSettings
from sr_assets.domain.permissions import USER_INFO, Action, Granted

_ANSWER_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.1
#: The server refuses this reply to a permitted publish as well, so that no subscriber receives the probe.
_REPLY: Final = b"_R_.probe"
#: A subject of a pattern.
_NODE: Final = "sr-assets-check"
_DENIED: Final = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE)


class PermissionProbe(Connection):
    """A connection that collects the server's complaints about permissions."""

    def __init__(self, cluster: ClusterSettings) -> None:
        super().__init__(cluster, "sr-assets permissions", request_seconds=_ANSWER_SECONDS)
        self.denied: set[tuple[Action, str]] = set()

    def note_denied(self, complaint: str) -> None:
        """Note a refused subject."""
        if (found_in := _DENIED.match(complaint)) is not None:
            action = Action.PUBLISH if found_in[1].lower() == "publish" else Action.SUBSCRIBE
            self.denied.add((action, found_in[2]))


def find_denied(cluster: ClusterSettings, wanted: Sequence[tuple[Action, str]]) -> set[tuple[Action, str]]:
    """Return the wanted permissions that the user of a connection lacks; raises WireError if no server responds.

    Without an account of its permissions, one subject of each pattern is probed; the server logs each of these probes as a
    violation.
    """
    with PermissionProbe(cluster) as probe:
        granted = _granted(probe)
        if granted is None:
            return _probed(probe, wanted)
    return {(action, subject) for action, subject in wanted if not granted[action].includes(subject)}


def _granted(probe: PermissionProbe) -> dict[Action, Granted] | None:
    """Return the user's account of its permissions, or None if the server sends none."""
    inbox = probe.new_inbox()
    probe.send(f.encode_pub(USER_INFO, inbox, b"", b""))
    deadline = times.monotonic() + _ANSWER_SECONDS
    while times.monotonic() < deadline and not probe.denied:
        for frame in probe.receive(_POLL_SECONDS):
            if frame.subject == inbox and frame.status is None:
                # A leaf node answers, too: with the permissions of its link.
                with contextlib.suppress(ValueError, AttributeError, TypeError):
                    answer = decode_response(frame.payload)
                    if answer.get("server", {}).get("id") == probe.server_id:
                        return parse_granted(answer)
    return None


def parse_granted(answer: dict[str, Any]) -> dict[Action, Granted] | None:
    """Return the permissions in a server's account of a user, or None if it has none; raises AttributeError or TypeError."""
    if "data" not in answer:
        return None
    rules = answer["data"].get("permissions") or {}
    return {action: _rules(rules.get(action.value) or {}) for action in (Action.PUBLISH, Action.SUBSCRIBE)}


def _rules(rules: dict[str, Any]) -> Granted:
    # A rule with a second word concerns queue groups, which we do not use.
    allow, deny = (tuple(rule for rule in rules.get(key) or () if " " not in rule) for key in ("allow", "deny"))
    return Granted(allow, deny)


def _probed(probe: PermissionProbe, wanted: Sequence[tuple[Action, str]]) -> set[tuple[Action, str]]:
    literal = {
        (action, subject): ".".join(_NODE if token in ("*", ">") else token for token in subject.split("."))
        for action, subject in wanted
    }
    for number, ((action, _), subject) in enumerate(literal.items(), 2):
        if action is Action.PUBLISH:
            probe.send(b"PUB %b %b 0\r\n\r\n" % (f.encode_subject(subject), _REPLY))
        else:
            probe.send(b"SUB %b %d\r\n" % (f.encode_subject(subject), number))
    probe.ping()
    return {permission for permission, subject in literal.items() if (permission[0], subject) in probe.denied}
