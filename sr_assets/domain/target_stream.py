"""The configuration of a target stream that is created for a source, and the sequence that no stream can reach.

Not here: what an existing target must be like (`stages.replication.target`), the request (`adapters.nats`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sr_assets.domain.subjects import covers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: No stream's last sequence: a publish that expects it is answered by every stream, with the code, and stored by none.
IMPOSSIBLE_SEQUENCE: Final = 18446744073709551614
WRONG_LAST_SEQUENCE: Final = 10071
_MIN_DUPLICATE_WINDOW_NS: Final = 120 * 1_000_000_000
#: Copied from the source's configuration unchanged; every other key is left out.
_TAKEN_OVER: Final = ("max_msgs", "max_bytes", "max_age", "max_msgs_per_subject", "max_msg_size", "discard")


def target_config(name: str, patterns: Iterable[str], source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a target stream that is to be created.

    `patterns` are the source's subjects, or the filter, as the copies have them; `source` is the configuration of the
    source stream as its server sends it. Every server since 2.9 knows each key. `num_replicas` is the source's; the target
    gets fewer where its cluster has fewer servers.
    """
    window_ns = max(_MIN_DUPLICATE_WINDOW_NS, source.get("duplicate_window", 0))
    max_age_ns = source.get("max_age", 0)
    return {
        "name": name,
        "subjects": _widest(patterns),
        "storage": source.get("storage", "file"),
        "retention": "limits",
        **{key: source[key] for key in _TAKEN_OVER if key in source},
        # The server refuses a window that is longer than messages live.
        "duplicate_window": min(window_ns, max_age_ns) if max_age_ns > 0 else window_ns,
        "num_replicas": max(1, source.get("num_replicas", 1)),
        "allow_direct": True,
    }


def _widest(patterns: Iterable[str]) -> list[str]:
    """Leave out patterns that another one covers: the server refuses overlapping subjects, which rewriting can produce."""
    unique = list(dict.fromkeys(patterns))
    return [pattern for pattern in unique if not any(other != pattern and covers(other, pattern) for other in unique)]
