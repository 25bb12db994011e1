"""The configuration of a new target stream, and a sequence that no stream can reach."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sr_assets.domain.positions import SECOND_NS
from sr_assets.domain.subjects import covers
from sr_assets.domain.topology.wanted import DEFAULTS, OUR_NAMES

#: The last sequence of no stream: every stream refuses a publish that expects it, with code 10071.
IMPOSSIBLE_SEQUENCE: Final = 18446744073709551614
_MIN_DUPLICATE_WINDOW_NS: Final = 120 * 1_000_000_000
#: Copied unchanged from the source's configuration; all other keys are omitted. A copy is larger than its original, so
#: `max_msg_size` is not among them: the source has applied it.
_TAKEN_OVER: Final = ("max_msgs", "max_bytes", "max_age", "max_msgs_per_subject", "discard")
#: JetStream's values of settings that a server may omit.
_OMITTED: Final[Mapping[str, Any]] = {**DEFAULTS, "allow_direct": False, "persist_mode": "default"}
#: What the server demands of a stream that it writes to disk after the acknowledgement.
_ASYNC_NEEDS: Final[Mapping[str, Any]] = {"storage": "file", "num_replicas": 1}
_DURATIONS: Final = ("max_age", "duplicate_window")
#: Words of nats-server's refusals of a new stream, by the refused setting.
_REFUSAL_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "subjects": ("subject",),
    "storage": ("memory", "storage"),
    "retention": ("retention",),
    "num_replicas": ("replica",),
    "max_age": ("max age",),
    "max_bytes": ("max bytes", "memory", "storage"),
    "max_msgs_per_subject": ("per subject",),
    "max_msg_size": ("message size", "max payload"),
    "discard": ("discard",),
    "duplicate_window": ("duplicate",),
    "placement": ("placement", "peers", "tags"),
}


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """The configured settings of a target, which replace the source's: JetStream's names and values.

    Durations are in nanoseconds; an unlimited value is -1, of `max_age` 0.
    """

    settings: tuple[tuple[str, Any], ...]

    @property
    def wanted(self) -> dict[str, Any]:
        """The settings as JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self.settings}

    def drift(self, existing: Mapping[str, Any]) -> list[str]:
        """Return each different key of an existing target, with its configured and its actual value."""
        differing = []
        for key, wanted in self.wanted.items():
            there = existing.get(key, _OMITTED.get(key))
            if key == "placement":
                there = {part: (there or {}).get(part) for part in wanted}
            if there != wanted and not (key == "subjects" and sorted(there or ()) == sorted(wanted)):
                name = OUR_NAMES.get(key, key)
                differing.append(f"{name} {shown_setting(key, there)}, wanted {shown_setting(key, wanted)}")
        return differing

    def refused(self, error: str) -> str:
        """Return the settings, with their values, that a server's refusal can mean; all if it names none."""
        text = error.lower()
        named = {key: value for key, value in self.wanted.items() if any(map(text.count, _REFUSAL_WORDS.get(key, ())))}
        return ", ".join(
            f"{OUR_NAMES.get(key, key)} {shown_setting(key, value)}" for key, value in (named or self.wanted).items()
        )


def target_config(
    name: str, patterns: Iterable[str], source: Mapping[str, Any], options: TargetOptions | None = None
) -> dict[str, Any]:
    """Return the configuration of a new target stream; `options` override the source's configuration.

    `patterns` are the rewritten subjects of the source, or of the filter; `source` is the source stream's configuration
    as its server sends it. Every server since 2.9 knows each key but `persist_mode`. If the cluster has too few servers for
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
        **(_ASYNC_NEEDS if wanted.get("persist_mode") == "async" else {}),
        **wanted,
    }


def shown_setting(key: str, value: object) -> str:
    """Return a setting's value as text: durations in seconds, JetStream's numbers without a limit as a word."""
    if isinstance(value, int) and not isinstance(value, bool) and value <= 0:
        return "unlimited"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value / SECOND_NS:g}s" if key in _DURATIONS and isinstance(value, int) else str(value)


def _widest(patterns: Iterable[str]) -> list[str]:
    """Omit patterns that another pattern covers: the server refuses overlapping subjects, which rewriting can produce."""
    unique = list(dict.fromkeys(patterns))
    return [pattern for pattern in unique if not any(other != pattern and covers(other, pattern) for other in unique)]
