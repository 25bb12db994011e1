"""The probes of `check --connect` on a Spark cluster: each executor's packages and its routes to every server.

They also test the permission for the writers' fence. Without a cluster there are no probes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sr_assets.adapters.connection_file import pack_cluster
from sr_assets.adapters.copying.fence import probe_fence
from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.spark.cluster import without_secret
from sr_assets.adapters.spark.config import is_cluster
from sr_assets.adapters.spark.remote import try_remotely
from sr_assets.adapters.spark.session import leave_session, open_session, spark_error
from sr_assets.domain.errors import SrAssetsError
from sr_assets.settings import StreamSettings

if TYPE_CHECKING:
    from sr_assets.settings import Settings

#: Probe, cluster and failure; None for success.
Tried = tuple[str, str, str | None]
#: A site's name has no slash, so this session belongs to no site.
_SESSION: Final = "run/check"


def try_executors(settings: Settings) -> list[Tried]:
    """Test every link from every executor, each in a task; return cluster, probe and failure."""
    mode = settings.spark.mode
    if not is_cluster(mode):
        return []
    tried: list[Tried] = []
    reachable = dict.fromkeys(cluster for entry in settings.entries for cluster in entry.clusters)
    try:
        links = {cluster.label: pack_cluster(cluster) for cluster in reachable}
        session = open_session(settings.spark, settings.home.resolve(), _SESSION)
        try:
            for executor, link, error in try_remotely(session, links):
                tried.append(
                    (link or without_secret(mode), f"connect from executor {executor}" if link else executor, error)
                )
        finally:
            leave_session(session, forget=True)
    except SrAssetsError as error:
        tried.append((without_secret(mode), "an executor that accepts a task", str(error)))
    except Exception as error:  # noqa: BLE001  any exception of Spark is a result here
        tried.append((without_secret(mode), "an executor that accepts a task", str(spark_error(error))))
    return tried + _try_fences(settings)


def _try_fences(settings: Settings) -> list[Tried]:
    tried: list[Tried] = []
    for stream in (entry for entry in settings.entries if isinstance(entry, StreamSettings)):
        subject, failure = stream.target.api(f"CONSUMER.INFO.{stream.target_stream}"), None
        try:
            with Cluster(stream.target, "sr-assets check") as target:
                probe_fence(target, stream.target_stream)
        except SrAssetsError as error:
            failure = str(error)
        tried.append((stream.target.label, subject, failure))
    return tried
