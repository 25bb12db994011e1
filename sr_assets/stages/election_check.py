"""The probes of `check --connect` about the leader election, locks and the store of checkpoints.

They concern the buckets, their keys, the duplicate windows of streams, and each site's checkpoint.
"""

from contextlib import closing

from sr_assets.adapters.election import BUCKET_TTL_NS, bucket_ttl_seconds, lock_ttl_seconds
from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.domain.election import election_key, lock_key
from sr_assets.domain.errors import RunError
from sr_assets.domain.positions import SECOND_NS
from sr_assets.domain.subjects import advisory_pattern
from sr_assets.settings import ClusterSettings, Entry, Settings, StreamSettings
from sr_assets.settings.data import split_label
from sr_assets.stages.checkpointing import find_checkpoint
from sr_assets.stages.locks import site_locks
from sr_assets.stages.probes import Probe, Probes
from sr_assets.stages.topology.applying import probe_update

_CLIENT = "sr-assets check"


def probe_election(settings: Settings, entry: Entry) -> list[Probe]:
    """Probe the election of an entry, if it has one; nothing is created or stored."""
    if not entry.leader_election_name:
        return []
    probes = Probes(entry.label)
    cluster, key = settings.election_cluster(entry), election_key(entry.name, entry.stream)
    ttl_seconds = probe_key(probes, cluster, settings.leader_election.bucket, key)
    if ttl_seconds and isinstance(entry, StreamSettings):
        _probe_windows(probes, entry, ttl_seconds)
    return probes.made


def probe_key(probes: Probes, where: ClusterSettings, bucket: str, key: str) -> float | None:
    """Probe a bucket and a key in it; return the bucket's TTL in seconds, or None if it is unusable."""
    with closing(Cluster(where, _CLIENT)) as cluster:
        ttl_seconds = probes.attempt(
            cluster,
            f"bucket {bucket}",
            lambda: _ttl_seconds(cluster, bucket),
            lambda seconds: f"TTL {seconds:g} s",
        )
        if ttl_seconds:
            subject = f"$KV.{bucket}.{key}"
            probes.attempt(cluster, f"publish {subject}", lambda: _try_key(cluster, bucket, subject))
    return ttl_seconds


def probe_store(settings: Settings, site: str) -> list[Probe]:
    """Probe the store of a site's checkpoints, if it has one; nothing is created or stored."""
    store = settings.checkpoint_store(site)
    if store is None:
        return []
    probes = Probes(site)
    assert isinstance(store.cluster, ClusterSettings)
    with closing(Cluster(store.cluster, _CLIENT)) as cluster:
        probes.attempt(
            cluster,
            f"object store {store.bucket}",
            lambda: find_checkpoint(settings, site),
            lambda newest: "holds a checkpoint" if newest else "holds no checkpoint yet",
        )
    return probes.made


def probe_locks(settings: Settings) -> list[Probe]:
    """Probe the bucket and the key of each lock; nothing is stored."""
    locks = sorted({lock for site in settings.sites for lock in site_locks(settings, site)})
    return [probe for lock in locks for probe in _probe_lock(settings, lock)]


def _probe_lock(settings: Settings, lock: str) -> list[Probe]:
    probes, (name, key) = Probes(f"lock {lock}"), split_label(lock)
    bucket, ttl_seconds = settings.data[name].bucket or "", settings.lock_ttl_ns / SECOND_NS
    with closing(Cluster(settings.data[name].cluster, _CLIENT)) as cluster:

        def ttl() -> float:
            info = cluster.stream_info(f"KV_{bucket}")
            return lock_ttl_seconds(cluster.settings.label, bucket, info.config, ttl_seconds)

        if probes.attempt(cluster, f"bucket {bucket}", ttl, lambda _: "allows a TTL per message"):
            subject, allowed = f"$KV.{bucket}.{lock_key(key)}", "allowed; no key was stored"
            probes.attempt(cluster, f"publish {subject}", lambda: cluster.try_publishing(subject), lambda _: allowed)
    return probes.made


def _ttl_seconds(cluster: Cluster, bucket: str) -> float:
    """Return the TTL of a bucket, or the one that it will have; raises RunError if it is unusable."""
    info = cluster.find_stream(f"KV_{bucket}")
    if info is not None:
        return bucket_ttl_seconds(cluster.settings.label, bucket, info.config)
    probe_update(cluster, "CREATE", f"KV_{bucket}")
    return BUCKET_TTL_NS / SECOND_NS


def _try_key(cluster: Cluster, bucket: str, subject: str) -> str:
    """Return a text about a key that we may write; raises RunError if we may not."""
    if not cluster.stream_exists(f"KV_{bucket}"):
        return "not tried: the first member creates the bucket"
    cluster.try_publishing(subject)
    return "allowed; no key was stored"


def _probe_windows(probes: Probes, stream: StreamSettings, ttl_seconds: float) -> None:
    """Probe the streams into which two members may send the same message when the leadership changes."""
    with closing(Cluster(stream.target, _CLIENT)) as target:
        _probe_window(probes, target, stream.target_stream, ttl_seconds)
    if stream.advisory is not None and stream.advisory_cluster is not None and stream.advisory.reliable is not False:
        with closing(Cluster(stream.advisory_cluster, _CLIENT)) as cluster:
            pattern = advisory_pattern(stream.advisory.subject)
            names = probes.attempt(cluster, f"streams of {pattern}", lambda: cluster.stream_names(pattern), ", ".join)
            for name in names or ():
                _probe_window(probes, cluster, name, ttl_seconds)


def _probe_window(probes: Probes, cluster: Cluster, stream: str, ttl_seconds: float) -> None:
    def window_seconds() -> float:
        info = cluster.find_stream(stream)
        seconds = float(info.config.get("duplicate_window", 0) / SECOND_NS) if info else 2 * ttl_seconds
        if seconds < 2 * ttl_seconds:
            raise RunError(
                f"stream {stream} on {cluster.settings.label} has a duplicate window of {seconds:g} s, less than two TTLs of the"
                f" leader election; set duplicate_window to {2 * ttl_seconds:g}s or more"
            )
        return seconds

    probes.attempt(
        cluster, f"a duplicate window of two TTLs in {stream}", window_seconds, lambda seconds: f"{seconds:g} s"
    )
