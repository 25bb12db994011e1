"""The published tables of the native streams. Add a table here."""

from typing import Final

from sr_assets.adapters.published.table import Table

#: Publication name of the topology tables; no site can have it.
TOPOLOGY_SITE: Final = ".topology"

TOPOLOGY_TABLES: Final[dict[str, Table]] = {
    "topology_streams": Table(
        """
        cluster VARCHAR, domain VARCHAR, stream VARCHAR, storage VARCHAR, replicas BIGINT, placement VARCHAR,
        consumers BIGINT, messages BIGINT, bytes BIGINT, lost BIGINT, deleted BIGINT, leader VARCHAR, as_of TIMESTAMPTZ,
        peers VARCHAR, api_level BIGINT, error VARCHAR
        """,
        "",
        "",
    ),
    "topology_links": Table(
        """
        cluster VARCHAR, stream VARCHAR, kind VARCHAR, origin_cluster VARCHAR, origin_stream VARCHAR, filter VARCHAR,
        transforms VARCHAR, active_seconds DOUBLE, lag_messages BIGINT, lag_seconds DOUBLE, error VARCHAR,
        as_of TIMESTAMPTZ, sampling VARCHAR, api_prefix VARCHAR, domain VARCHAR, origin_domain VARCHAR, dead BOOLEAN
        """,
        "",
        "",
    ),
    "topology_drift": Table(
        "cluster VARCHAR, stream VARCHAR, key VARCHAR, wanted VARCHAR, found VARCHAR, remedy VARCHAR", "", ""
    ),
}
