"""Metrics of the leader election and the checkpoints, from the files of each site."""

from collections.abc import Iterator
from typing import Final

from sr_assets.adapters import times
from sr_assets.adapters.state.checkpoint import last_stored
from sr_assets.adapters.state.lease import Lease
from sr_assets.domain.election import heartbeats_site
from sr_assets.domain.exposition import Sample, expose, labels
from sr_assets.settings import Settings

_PREFIX: Final = "choria_stream_replicator_election_"


def election_lines(settings: Settings) -> Iterator[str]:
    """Yield the lines of the election's metrics; none for sites without an election."""
    leases = {site: Lease.read(settings.home / "sites" / site) for site in settings.sites}
    # As in the Stream Replicator, the election of the heartbeats has no replicator.
    heartbeats = Lease.read(settings.home / "sites" / heartbeats_site(settings.replicator))
    elections = [*((lease, settings.replicator) for lease in leases.values()), (heartbeats, "unknown")]
    keys = [(key, (member, replicator), lease) for lease, replicator in elections for key, member in lease.keys.items()]

    def named(key: str, member: tuple[str, str], **more: str) -> str:
        return labels(election=key, identity=member[0], **more, replicator=member[1])

    campaigns = (
        Sample(named(key, member, state=state), float(count))
        for key, member, lease in keys
        for state, count in lease.campaigns.items()
    )
    yield from expose(f"{_PREFIX}campaigns", "counter", "Campaigns for a key, by state.", campaigns)
    leaders = (Sample(named(key, member), float(lease.holds)) for key, member, lease in keys)
    yield from expose(f"{_PREFIX}leader", "gauge", "1 while this member leads.", leaders)
    intervals = (Sample(named(key, member), lease.interval_seconds) for key, member, lease in keys)
    yield from expose(f"{_PREFIX}interval_seconds", "gauge", "Mean pause between two campaigns.", intervals)
    sites = (Sample(labels(name=site), float(lease.holds)) for site, lease in leases.items() if lease.keys)
    ages = (
        Sample(labels(name=site), max(0.0, times.time() - stored.at_ns / 1e9))
        for site in settings.sites
        if (stored := last_stored(settings.home / "sites" / site)) and settings.checkpoint_store(site)
    )
    yield from expose("sr_assets_checkpoint_age_seconds", "gauge", "Age of the newest checkpoint by this home.", ages)
    yield from expose("sr_assets_leader", "gauge", "1 while this member leads the site.", sites)
