"""Conversion of an old replicator's file with `topics:`: the new value of each key, or the reason to drop it.

The old replicator copied channels of NATS Streaming.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from sr_assets.domain.errors import ConfigurationError
from sr_assets.settings.names import PLACEHOLDER
from sr_assets.settings.values import read_span, shown

#: The old replicator's default.
_SOURCE_URL: Final = "nats://localhost:4222"
#: The name without `--name`.
_REPLICATOR: Final = "STREAM_REPLICATOR"
_TLS: Final = ("identity", "scheme", "ssl_dir", "ca", "cert", "key")
_NO_CLUSTER: Final = "dropped: JetStream has no cluster id"
_NO_GROUP: Final = (
    "dropped: sr-assets keeps its own positions, so there is no queue group; `workers` writers share a stream"
)
_LEFT_TOP: Final = {
    "verbose": "dropped: it had no effect",
    "state_dir": "dropped: its caches have another format; state_store is a new directory",
}


@dataclass(slots=True)
class Imported:
    """A converted configuration, the conversion of each old key (`notes`), and open `questions`, by topic."""

    document: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)


def import_topics(tree: Mapping[Any, Any], name: str | None = None) -> Imported:
    """Return the configuration of an old file's tree; raises ConfigurationError for another file.

    Without `name`, the replicator's name is an open question: a centre distinguishes replicators by it.
    A stream replaces a channel; the old file does not name it, so it becomes a placeholder that `check` refuses.
    """
    old = {str(key).lower(): value for key, value in tree.items()}
    if "streams" in old:
        raise ConfigurationError("has streams: it is the current Stream Replicator's file, which needs no conversion")
    topics = old.pop("topics", None)
    if not isinstance(topics, dict) or not topics:
        raise ConfigurationError("has no topics; the old replicator's file has at least one")
    made = Imported({"name": name or _REPLICATOR})
    made.notes.append(f"name: {name or _REPLICATOR}, which has no key in the old file")
    if name is None:
        made.questions.append(
            f"name: which name is this replicator's alone? It replaces {_REPLICATOR}; import --name NAME sets it"
        )
    _import_top(old, made)
    made.document["streams"] = []
    for label, topic in topics.items():
        if not isinstance(topic, dict):
            raise ConfigurationError(f"topics.{shown(label)}: must be a mapping of keys to values")
        entry = _Topic(str(label), {str(key).lower(): value for key, value in topic.items()}, made)
        made.document["streams"].append(entry.imported())
    _make_distinct(made)
    return made


def _make_distinct(made: Imported) -> None:
    """Append a number to each repeated name: entries with one name and stream would share a position."""
    taken = {entry["name"] for entry in made.document["streams"]}
    seen: set[str] = set()
    for entry in made.document["streams"]:
        name = entry["name"]
        if name in seen:
            entry["name"] = next(numbered for number in count(2) if (numbered := f"{name}_{number}") not in taken)
            taken.add(entry["name"])
            made.notes.append(f"{entry['filter_subject']}: became name {entry['name']}, because {name} appears twice")
        seen.add(name)


def _import_top(old: dict[str, Any], made: Imported) -> None:
    for key, value in old.items():
        if key == "debug":
            if value:
                made.document["loglevel"] = "debug"
            made.notes.append("debug: became loglevel")
        elif key == "logfile":
            made.document["logfile"] = value
            made.notes.append("logfile: as it was")
        elif key == "tls":
            made.document["tls"] = _tls(value, "tls", made)
        else:
            made.notes.append(f"{shown(key)}: {_LEFT_TOP.get(key, 'dropped: the old replicator did not know it')}")


def _tls(block: object, where: str, made: Imported) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise ConfigurationError(f"{where}: must be a mapping of keys to values")
    known = {str(key).lower(): value for key, value in block.items()}
    for key in known.keys() - set(_TLS):
        made.notes.append(f"{where}.{shown(key)}: dropped: the old replicator did not know it")
    made.notes.append(f"{where}: as it was")
    kept = {key: known[key] for key in _TLS if known.get(key)}
    if kept.get("scheme") == "puppet":
        # The old replicator ignored files next to the scheme.
        kept = {key: kept[key] for key in ("scheme", "identity", "ssl_dir") if key in kept}
    elif "ssl_dir" in kept:
        del kept["ssl_dir"]
    return kept


class _Topic:
    """One topic during the conversion: known keys are removed from it until only unknown ones remain."""

    def __init__(self, label: str, topic: dict[str, Any], made: Imported) -> None:
        self._label, self._topic, self._made = label, topic, made
        self._subject = str(topic.get("topic") or "")
        self._entry: dict[str, Any] = {}

    def imported(self) -> dict[str, Any]:
        """Return the stream's entry; raises ConfigurationError if the old replicator would not have started."""
        if not self._subject:
            raise ConfigurationError(f"topics.{self._label}: has no topic")
        if not self._topic.get("target_url"):
            raise ConfigurationError(f"topics.{self._label}: has no target_url")
        self._names()
        self._workers()
        self._sampling()
        self._rest()
        return self._entry

    def _note(self, key: str, text: str) -> None:
        self._made.notes.append(f"topics.{self._label}.{key}: {text}")

    def _ask(self, key: str, text: str) -> None:
        self._made.questions.append(f"topics.{self._label}.{key}: {text}")

    def _names(self) -> None:
        entry, topic = self._entry, self._topic
        plain = self._subject.replace(".", "_")
        entry["stream"] = f"{PLACEHOLDER}{self._subject}"
        self._ask("stream", f"which stream of the source takes {self._subject}? It replaces {entry['stream']!r}")
        durable = topic.pop("name", None) or f"{self._label}_{plain}_stream_replicator"
        entry["name"] = re.sub(r"[\s/\\*>]", "_", str(durable))
        self._note("name", f"became name {entry['name']}, the replicator in advisories of format v1")
        entry["source_url"] = topic.pop("source_url", None) or _SOURCE_URL
        entry["target_url"] = topic.pop("target_url")
        entry["filter_subject"] = topic.pop("topic")
        self._note("topic", "became filter_subject; copies keep their subject, and the target its stream's name")

    def _workers(self) -> None:
        workers = self._topic.pop("workers", 1) or 1
        if workers != 1:
            self._entry["workers"] = workers
            self._note("workers", "as it was; each sender's copies keep their order where senders are known")
        for key in ("source_cluster_id", "target_cluster_id"):
            if self._topic.pop(key, None) is not None:
                self._note(key, _NO_CLUSTER)
        for key in ("queued", "queue_group"):
            if self._topic.pop(key, None) is not None:
                self._note(key, _NO_GROUP)

    def _sampling(self) -> None:
        entry, topic = self._entry, self._topic
        inspect, age, flag = (topic.pop(key, None) for key in ("inspect", "age", "update_flag"))
        advisory = topic.pop("advisory", None)
        if inspect and age:
            entry["inspect_field"], entry["inspect_duration"] = inspect, age
            self._note("inspect, age", "became inspect_field and inspect_duration")
            if flag:
                entry["inspect_force_field"] = flag
                self._note("update_flag", "became inspect_force_field")
            if advisory:
                if not isinstance(advisory, dict):
                    raise ConfigurationError(f"topics.{self._label}.advisory: must be a mapping of keys to values")
                self._advisory({str(key).lower(): value for key, value in advisory.items()}, age)
            return
        for key, value in (("inspect", inspect), ("age", age), ("update_flag", flag), ("advisory", advisory)):
            if value:
                self._note(key, "dropped: without both inspect and age the old replicator copied everything")
        if "workers" in entry:
            entry["order"] = "none"

    def _advisory(self, advisory: dict[str, Any], age: str) -> None:
        subject, cluster, silent = (advisory.pop(key, None) for key in ("target", "cluster", "age"))
        if not subject:
            self._note("advisory", "dropped: it has no target")
            return
        cluster = "source" if cluster == "source" else "target"
        self._entry["advisory"] = {"subject": subject, "cluster": cluster, "reliable": True, "format": "v1"}
        self._note("advisory", f"became advisory with format v1; its subject needs a stream on the {cluster}'s cluster")
        if silent and _shorter(silent, age):
            self._entry["warn_duration"] = silent
            self._note("advisory.age", "became warn_duration")
        else:
            self._ask(
                "advisory.age",
                f"{shown(silent)} is not shorter than age; is half of age, the default of warn_duration, correct?",
            )
        for key in advisory:
            self._note(f"advisory.{key}", "dropped: the old replicator did not know it")

    def _rest(self) -> None:
        entry, topic = self._entry, self._topic
        if (block := topic.pop("tls", None)) is not None:
            entry["tls"] = _tls(block, f"topics.{self._label}.tls", self._made)
        for key in ("disable_source_tls", "disable_target_tls"):
            if topic.pop(key, False):
                entry[key] = True
                self._note(key, "as it was")
        if port := topic.pop("monitor", 0):
            self._monitor(port)
        for key in topic:
            self._note(key, "dropped: the old replicator did not know it")

    def _monitor(self, port: object) -> None:
        metrics = self._made.document.setdefault("metrics", {"port": port, "legacy": True})
        if metrics["port"] == port:
            self._note("monitor", "became metrics.port, for all streams, with the old names too")
        else:
            self._note("monitor", f"dropped: one port, {metrics['port']}, serves all streams")


def _shorter(silent: object, age: object) -> bool:
    try:
        return 0 < read_span(silent) < read_span(age)
    except ValueError:
        return False
