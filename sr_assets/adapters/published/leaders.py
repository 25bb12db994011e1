"""The table `site_leaders`, and the columns `role` and `leader` of `snapshot_info`: who leads each site.

They are written into `fleet.duckdb` itself, because they change without a run of the site.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sr_assets.adapters.published.table import at
from sr_assets.adapters.published.topology_schema import TOPOLOGY_SITE
from sr_assets.adapters.state.checkpoint import last_stored
from sr_assets.adapters.state.lease import Lease

if TYPE_CHECKING:
    import duckdb

SITE_LEADERS: Final = (
    "name VARCHAR, role VARCHAR, leader VARCHAR, leader_host VARCHAR, since TIMESTAMPTZ, checkpoint_at TIMESTAMPTZ"
)
_MIXED: Final = "mixed"


def write_leaders(connection: duckdb.DuckDBPyConnection, home: Path, sites: Iterable[str]) -> tuple[str, str | None]:
    """Create `fleet.site_leaders` with a row per site; return the common role and leader of all sites.

    The role is `mixed` and the leader None if the sites differ. A site without an election is led by this home.
    """
    rows = [_row(home, site) for site in sorted(sites) if site != TOPOLOGY_SITE]
    connection.execute(f"CREATE TABLE fleet.site_leaders ({SITE_LEADERS})")
    if rows:
        insert = f"INSERT INTO fleet.site_leaders SELECT $1, $2, $3, $4, {at('$5::BIGINT')}, {at('$6::BIGINT')}"
        connection.executemany(insert, rows)
    agreed = {(role, leader) for _, role, leader, *_ in rows}
    return agreed.pop() if len(agreed) == 1 else (_MIXED, None)


def _row(home: Path, site: str) -> tuple[str, str, str | None, str | None, int | None, int | None]:
    folder = home / "sites" / site
    lease, checkpoint = Lease.read(folder), last_stored(folder)
    role = "leader" if lease.holds or not lease.keys else "follower"
    return site, role, lease.leader, lease.leader_host, lease.since_ns, checkpoint and checkpoint.at_ns
