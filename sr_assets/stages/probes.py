"""Probes of `sr-assets check --connect`: one record for each, and their collection for one subject."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from sr_assets.adapters.nats.administration import Cluster
from sr_assets.domain.errors import SrAssetsError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe; `stream` is its subject: `name/stream`, `topology CLUSTER`, `heartbeats` or `spark`.

    `cluster` lists the servers, `learned` is the result as text.
    """

    stream: str
    cluster: str
    tried: str
    works: bool
    learned: str


class Probes:
    """Collects the probes of one subject."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self.made: list[Probe] = []

    def attempt(
        self, cluster: Cluster, tried: str, work: Callable[[], T], learned: Callable[[T], str] = str
    ) -> T | None:
        """Call `work` and record the probe; return its result, or None if it failed."""
        try:
            result = work()
        except SrAssetsError as error:
            self.note(cluster, tried, works=False, learned=str(error))
            return None
        self.note(cluster, tried, works=True, learned=learned(result))
        return result

    def note(self, cluster: Cluster, tried: str, *, works: bool, learned: str) -> None:
        """Record a probe."""
        self.made.append(Probe(self._subject, cluster.settings.label, tried, works, learned))
