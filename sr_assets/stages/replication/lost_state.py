"""The check before a stream's first message: copies or advisories of it without a state mean that the state was lost.

Starting over would store the copies twice and announce every node as new.
"""

import logging
from collections.abc import Iterator

from sr_assets.adapters import wire
from sr_assets.adapters.nats.cluster import Cluster
from sr_assets.adapters.nats.stream_info import StreamInfo
from sr_assets.adapters.state.records import CopyState
from sr_assets.adapters.state.store import SiteState
from sr_assets.domain.errors import RunError, TransientError
from sr_assets.domain.positions import SequenceRange
from sr_assets.domain.provenance import Identity, doubled_text, find_copy, foreign_copy, forged_text
from sr_assets.domain.received import Advisory, read_message
from sr_assets.domain.subjects import advisory_pattern, matcher
from sr_assets.settings import StreamSettings
from sr_assets.stages.connections import Clusters
from sr_assets.stages.progress import LongWork
from sr_assets.stages.replication.copies import first_genuine, read_stream
from sr_assets.stages.replication.target import copies_pattern

logger = logging.getLogger(__name__)


def refuse_lost_state(stream: StreamSettings, store: SiteState, clusters: Clusters) -> None:
    """Raise RunError if a tracked stream without a position has copies in its target, or stored advisories.

    A stream may begin while its target is unreachable, but only if nothing can be announced a second time: it has no
    advisories, or their stream holds none of it. Otherwise TransientError is raised.
    """
    source = clusters.connect(stream.source).stream_info(stream.stream)
    unannounced = stream.advisory is None or _refuse_announced(stream, clusters)
    try:
        target = clusters.connect(stream.target).find_stream(stream.target_stream)
        refuse_lost_copies(stream, store, store.load_copying(stream.stream), source, target)
    except TransientError as error:
        if not unannounced:
            raise
        logger.warning("%s: nodes are tracked, although the target's copies are unknown: %s", stream.label, error)


def _refuse_announced(stream: StreamSettings, clusters: Clusters) -> bool:
    """Raise RunError if a stream has stored advisories; return whether it is proven that none were announced."""
    assert stream.advisory is not None
    assert stream.advisory_cluster is not None
    if stream.advisory.reliable is False:
        return False
    cluster = clusters.connect(stream.advisory_cluster)
    try:
        keepers = cluster.stream_names(advisory_pattern(stream.advisory.subject))
        advisory = next(stored_advisories(stream, cluster), None)
    except RunError as error:
        if isinstance(error, TransientError) and not isinstance(error, wire.DeniedError):
            raise
        logger.warning("%s: cannot read the stored advisories, which would show a lost state: %s", stream.label, error)
        return False
    if advisory is not None:
        raise RunError(
            f"there is no state for {stream.label}, but a stream on {stream.advisory_cluster.label} already holds"
            f" advisories of it (node {advisory.node}, transition {advisory.transition}); run `sr-assets recover --stream"
            f" {stream.label}`"
        )
    return bool(keepers)


def refuse_lost_copies(
    stream: StreamSettings, store: SiteState, copying: CopyState, source: StreamInfo, target: StreamInfo | None
) -> None:
    """Raise RunError if the target holds copies of a stream whose state has none.

    The whole target is scanned once in a stream's life: on a shared target, our copies may be older than many others. An
    interrupted scan resumes; the scan of another target does not count. The state then has the name of the target, which
    proves that copies found later belong to a later state.
    """
    if not stream.ephemeral and target is not None:
        _scan(stream, store, copying, source, target)
    copying.target_stream, copying.target_checked = stream.target_stream, target.last_sequence if target else 0
    with store.transaction():
        store.save_copying(copying)


def _scan(stream: StreamSettings, store: SiteState, copying: CopyState, source: StreamInfo, target: StreamInfo) -> None:
    looked = copying.target_looked if copying.target_looked_ns == target.created_ns else 0
    after = target.last_sequence + 1
    held = SequenceRange(min(max(1, target.first_sequence, looked + 1), after), after)
    if not len(held):
        return
    identity = Identity(stream.stream, stream.replicator, stream.name)
    foreign: Identity | None = None
    # Copies of an entry with another filter have other subjects.
    possible = matcher([copies_pattern(stream, target) or ">"])
    looking = f"{stream.label}: scanning target stream {stream.target_stream}"
    forged = 0
    with LongWork(looking, len(held)) as progress, wire.Connection(stream.target, "sr-assets review") as connection:
        for messages in wire.read_headers(connection, stream.target_stream, held):
            claims = [(message, copy) for message in messages if (copy := find_copy(message.headers, identity))]
            genuine = None
            for message, copy in claims:
                if copy.created_ns not in (None, source.created_ns):
                    genuine = message.sequence, copy.sequence
                    break
            if claims and genuine is None:
                # A run cannot copy again what the source never held.
                genuine = first_genuine(stream, claims, lost_until=source.last_sequence)
            if genuine is not None:
                at, sequence = genuine
                raise RunError(
                    f"there is no state for {stream.label}, but target stream {stream.target_stream} already holds copies"
                    f" of it ({sequence} at {at}); run `sr-assets recover --stream {stream.label}`"
                )
            forged += len(claims)
            for message in messages:
                if foreign is None and possible(message.subject):
                    foreign = foreign_copy(message.headers, identity, source.created_ns)
            if progress.reached(messages[-1].sequence + 1 - held.first):
                _note_scan(store, copying, target, messages[-1].sequence)
    if forged:
        logger.error("%s: %s", stream.label, forged_text(stream.target_stream, forged))
    _note_scan(store, copying, target, target.last_sequence)
    if foreign is not None:
        logger.warning("%s: %s", stream.label, doubled_text(stream.target_stream, identity, foreign))


def _note_scan(store: SiteState, copying: CopyState, target: StreamInfo, sequence: int) -> None:
    """Save the progress of a target scan."""
    copying.target_looked_ns, copying.target_looked = target.created_ns, sequence
    with store.transaction():
        store.save_copying(copying)


def stored_advisories(stream: StreamSettings, cluster: Cluster) -> Iterator[Advisory]:
    """Yield a stream's advisories in the streams that keep their subject, each stream's in order."""
    assert stream.advisory is not None
    pattern = advisory_pattern(stream.advisory.subject)
    for keeper in cluster.stream_names(pattern):
        for message in read_stream(cluster.settings, cluster.stream_info(keeper), pattern):
            advisory = read_message(message.payload, message.stored_ns)
            if isinstance(advisory, Advisory) and advisory[:3] == (stream.replicator, stream.name, stream.stream):
                yield advisory


def last_announced(stream: StreamSettings, clusters: Clusters, unknown: list[str]) -> dict[str, Advisory]:
    """Return each node's stored advisory with the highest number: a centre ranks by it."""
    announced: dict[str, Advisory] = {}
    if stream.advisory is None or stream.advisory_cluster is None:
        return announced
    try:
        for advisory in stored_advisories(stream, clusters.connect(stream.advisory_cluster)):
            known = announced.get(advisory.node)
            if known is None or advisory.transition > known.transition:
                announced[advisory.node] = advisory
    except RunError as error:
        unknown.append(f"which transitions were announced: {error}")
        return announced
    if not announced:
        unknown.append(f"which transitions were announced: no stream on {stream.advisory_cluster.label} has any")
    return announced
