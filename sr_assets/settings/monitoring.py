"""How a deployment is watched from outside, as frozen records.

Not here: the other records (`records`), how the file is read (`loading`).
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Where metrics are shown: `port` None serves none, `textfile` None writes none.

    `legacy`: with the names of the Stream Replicator's first generation.
    """

    port: int | None = None
    host: str = "127.0.0.1"
    legacy: bool = False
    textfile: Path | None = None
