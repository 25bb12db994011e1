"""The settings of Spark, as a frozen record."""

import re
from dataclasses import dataclass, field
from typing import Any

from sr_assets.domain.sizing import FROM_MESSAGES


@dataclass(frozen=True, slots=True, repr=False)
class SparkSettings:
    """Spark's mode (`connect-local`, `classic`, `sc://…`, `spark://…`), its minimum batch, and its configuration.

    A batch of fewer than `from_messages` messages is processed in the run's own process.
    """

    mode: str = "connect-local"
    from_messages: int = FROM_MESSAGES
    config: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def public(self) -> dict[str, Any]:
        """The public part: the mode without its parameters, and no value whose key may name a secret."""
        secret = re.compile(r"secret|password|token|credential|key", re.IGNORECASE)
        config = {key: value for key, value in self.config.items() if not secret.search(key)}
        return {"mode": self.mode.partition(";")[0].rpartition("@")[2], "config": config}

    def __repr__(self) -> str:
        return f"SparkSettings({self.public})"
