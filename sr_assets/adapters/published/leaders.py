"""The table `site_leaders`, and the columns `role` and `leader` of `snapshot_info`: who leads each site.

They are written into `fleet.duckdb` itself, because they change without a run of the site.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from sr_assets.adapters.published.table import at
from sr_assets.adapters.published.topology_schema import TOPOLOGY_SITE
from sr_assets.adapters.state.checkpoint import last_stored
from sr_assets.adapters.state.lease import Lease

if TYPE_CHECKING:
    import duckdb

LEADERS: Final = "site_leaders"
SITE_LEADERS: Final = (
    "name VARCHAR, role VARCHAR, leader VARCHAR, leader_host VARCHAR, since TIMESTAMPTZ, checkpoint_at TIMESTAMPTZ"
)
_MIXED: Final = "mixed"


class Leader(NamedTuple):
    """A row of `site_leaders`; the times are in unix ns."""

    site: str
    role: str
    leader: str | None
    host: str | None
    since_ns: int | None
    checkpoint_ns: int | None


def read_leaders(home: Path, sites: Iterable[str]) -> list[Leader]:
    """Return the leader of each site. A site without an election is led by this home."""
    return [_row(home, site) for site in sorted(sites) if site != TOPOLOGY_SITE]


def common_leader(rows: Iterable[Leader]) -> tuple[str, str | None]:
    """Return the common role and leader of all sites, or `mixed` and None if the sites differ."""
    agreed = {(row.role, row.leader) for row in rows}
    return agreed.pop() if len(agreed) == 1 else (_MIXED, None)


def write_leaders(connection: duckdb.DuckDBPyConnection, rows: Sequence[Leader]) -> None:
    """Create or replace `fleet.site_leaders`."""
    connection.execute(f"CREATE OR REPLACE TABLE fleet.{LEADERS} ({SITE_LEADERS})")
    if rows:
        insert = f"INSERT INTO fleet.{LEADERS} SELECT $1, $2, $3, $4, {at('$5::BIGINT')}, {at('$6::BIGINT')}"
        connection.executemany(insert, rows)


def _row(home: Path, site: str) -> Leader:
    folder = home / "sites" / site
    lease, checkpoint = Lease.read(folder), last_stored(folder)
    role = "leader" if lease.holds or not lease.keys else "follower"
    return Leader(site, role, lease.leader, lease.leader_host, lease.since_ns, checkpoint and checkpoint.at_ns)
