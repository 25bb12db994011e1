"""Where Spark runs, as a frozen record.

Not here: the other records (`records`), how the file is read (`loading`).
"""

import re
from dataclasses import dataclass, field
from typing import Any

from sr_assets.domain.sizing import FROM_MESSAGES


@dataclass(frozen=True, slots=True, repr=False)
class SparkSettings:
    """Where Spark runs (`connect-local`, `classic`, `sc://…`, `spark://…`), which batches are for it, extra configuration.

    A batch of fewer than `from_messages` messages is read and copied in the run's own process.
    """

    mode: str = "connect-local"
    from_messages: int = FROM_MESSAGES
    config: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def public(self) -> dict[str, Any]:
        """The part that may be shown: the mode without its parameters, and no value whose key may name a secret."""
        secret = re.compile(r"secret|password|token|credential|key", re.IGNORECASE)
        config = {key: value for key, value in self.config.items() if not secret.search(key)}
        return {"mode": self.mode.partition(";")[0].rpartition("@")[2], "config": config}

    def __repr__(self) -> str:
        return f"SparkSettings({self.public})"
