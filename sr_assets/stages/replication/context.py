"""The resources for copying one stream during a run, passed to each step instead of the whole site."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sr_assets.adapters.spark.run_session import SparkConnection
    from sr_assets.adapters.state.store import SiteState
    from sr_assets.settings import StreamSettings
    from sr_assets.stages.clock import Clock
    from sr_assets.stages.connections import Clusters, ConnectionFiles
    from sr_assets.stages.report import StreamReport


@dataclass(frozen=True, slots=True)
class CopyContext:
    """A stream, its state with a separate connection, and the connections to clusters and Spark.

    `home` contains the history, `folder` is the site's directory with writer locks and staged files.
    """

    stream: StreamSettings
    store: SiteState
    clusters: Clusters
    spark: SparkConnection
    files: ConnectionFiles
    clock: Clock
    home: Path
    folder: Path
    report: StreamReport

    @property
    def writers(self) -> Path:
        """The folder of this stream's writers."""
        return writers_folder(self.folder, self.stream)


def writers_folder(site: Path, stream: StreamSettings) -> Path:
    """Return the directory of a stream's writers inside its site's: locks, the active batch, its fence."""
    return (site / "writers" / stream.asset_prefix[1]).resolve()
