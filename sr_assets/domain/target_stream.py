"""The configuration of a new target stream, and a sequence that no stream can reach."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sr_assets.domain.positions import SECOND_NS
from sr_assets.domain.subjects import covers

#: The last sequence of no stream: every stream refuses a publish that expects it, with code 10071.
IMPOSSIBLE_SEQUENCE: Final = 18446744073709551614
_MIN_DUPLICATE_WINDOW_NS: Final = 120 * 1_000_000_000
#: Copied unchanged from the source's configuration; all other keys are omitted. A copy is larger than its original, so
#: `max_msg_size` is not among them: the source has applied it.
_TAKEN_OVER: Final = ("max_msgs", "max_bytes", "max_age", "max_msgs_per_subject", "discard")


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """The configured options of a target, which replace the source's settings.

    `max_age` is in nanoseconds; None keeps the source's value. `cluster` and `tags` define the placement.
    """

    storage: str | None = None
    replicas: int | None = None
    max_age: int | None = None
    max_bytes: int | None = None
    max_msgs: int | None = None
    cluster: str | None = None
    tags: tuple[str, ...] = ()

    @property
    def wanted(self) -> dict[str, Any]:
        """The configured keys with the server's names."""
        placement = {"cluster": self.cluster, "tags": list(self.tags)}
        keys = {
            "storage": self.storage,
            "num_replicas": self.replicas,
            "max_age": self.max_age,
            "max_bytes": self.max_bytes,
            "max_msgs": self.max_msgs,
            "placement": {key: value for key, value in placement.items() if value},
        }
        return {key: value for key, value in keys.items() if value}

    def drift(self, existing: Mapping[str, Any]) -> list[str]:
        """Return each different key of an existing target, with its configured and its actual value."""
        differing = []
        for key, wanted in self.wanted.items():
            there = existing.get(key)
            if key == "placement":
                there = {part: (there or {}).get(part) for part in wanted}
            if there != wanted:
                differing.append(f"{key} {_shown(key, there)}, wanted {_shown(key, wanted)}")
        return differing


def target_config(
    name: str, patterns: Iterable[str], source: Mapping[str, Any], options: TargetOptions | None = None
) -> dict[str, Any]:
    """Return the configuration of a new target stream; `options` override the source's configuration.

    `patterns` are the rewritten subjects of the source, or of the filter; `source` is the source stream's configuration
    as its server sends it. Every server since 2.9 knows each key. If the cluster has too few servers for
    `num_replicas`, `Cluster.create_stream` requests fewer.
    """
    wanted = options.wanted if options else {}
    window_ns = max(_MIN_DUPLICATE_WINDOW_NS, source.get("duplicate_window", 0))
    max_age_ns = wanted.get("max_age", source.get("max_age", 0))
    return {
        "name": name,
        "subjects": _widest(patterns),
        "storage": source.get("storage", "file"),
        "retention": "limits",
        **{key: source[key] for key in _TAKEN_OVER if key in source},
        # The server refuses a window longer than the messages' lifetime.
        "duplicate_window": min(window_ns, max_age_ns) if max_age_ns > 0 else window_ns,
        "num_replicas": max(1, source.get("num_replicas", 1)),
        "allow_direct": True,
        **wanted,
    }


def _shown(key: str, value: object) -> str:
    return f"{value / SECOND_NS:g}s" if key == "max_age" and isinstance(value, int) else str(value)


def _widest(patterns: Iterable[str]) -> list[str]:
    """Omit patterns that another pattern covers: the server refuses overlapping subjects, which rewriting can produce."""
    unique = list(dict.fromkeys(patterns))
    return [pattern for pattern in unique if not any(other != pattern and covers(other, pattern) for other in unique)]
