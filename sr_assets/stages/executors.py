"""What `check --connect` tries on a Spark cluster: whether each executor has what it needs and reaches every server.

Here too: whether a target lets a run ask for the fence of its writers. Without a cluster nothing is tried. Not here: the
probes from this machine (`connectivity`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sr_assets.adapters.connection_file import pack_cluster
from sr_assets.adapters.copying.fence import may_ask
from sr_assets.adapters.spark.cluster import without_secret
from sr_assets.adapters.spark.config import is_cluster
from sr_assets.adapters.spark.remote import try_remotely
from sr_assets.adapters.spark.session import leave_session, open_session, spark_error
from sr_assets.adapters.wire import Connection
from sr_assets.domain.errors import SrAssetsError
from sr_assets.settings import StreamSettings

if TYPE_CHECKING:
    from sr_assets.settings import Settings

#: What was tried, where, and why it failed, None when it works.
Tried = tuple[str, str, str | None]
#: A site's name has no slash, so this is no site's session.
_SESSION: Final = "run/check"


def try_executors(settings: Settings) -> list[Tried]:
    """Try every link from every executor, each in a task; returns the cluster that was tried, what, and the failure."""
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
        tried.append((without_secret(mode), "an executor that takes a task", str(error)))
    except Exception as error:  # noqa: BLE001  whatever Spark raises is a result here
        tried.append((without_secret(mode), "an executor that takes a task", str(spark_error(error))))
    return tried + _try_fences(settings)


def _try_fences(settings: Settings) -> list[Tried]:
    tried: list[Tried] = []
    for stream in (entry for entry in settings.entries if isinstance(entry, StreamSettings)):
        asked, failure = stream.target.api(f"CONSUMER.INFO.{stream.target_stream}"), None
        try:
            with Connection(stream.target, "sr-assets check") as target:
                may_ask(target, stream.target_stream)
        except SrAssetsError as error:
            failure = str(error)
        tried.append((stream.target.label, asked, failure))
    return tried
