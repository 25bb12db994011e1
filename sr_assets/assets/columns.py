"""The columns of every table that is an asset: their types as DuckDB declares them, and their descriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import dagster as dg

from sr_assets.adapters.published.daily import DAILY_TABLES
from sr_assets.adapters.published.schema import (
    INTERNAL,
    NODE_COLUMNS,
    SNAPSHOT_COLUMNS,
    SNAPSHOT_INFO,
    TABLES,
    TOPOLOGY_TABLES,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_HOPS: Final = TABLES["heartbeat_hops"].kinds
_TYPES: Final[Mapping[str, Mapping[str, str]]] = {
    **{name: table.kinds for name, table in (TABLES | TOPOLOGY_TABLES).items() if name not in INTERNAL},
    **{table.name: table.kinds for table in DAILY_TABLES},
    "node_availability": NODE_COLUMNS,
    "node_snapshots": SNAPSHOT_COLUMNS,
    "heartbeats": {name: kind for name, kind in _HOPS.items() if name not in ("hop_name", "hop_stream")},
    "snapshot_info": dict(column.split(maxsplit=1) for column in SNAPSHOT_INFO.split(",")),
    "messages": {
        "sequence": "BIGINT",
        "subject": "VARCHAR",
        "stored_at": "TIMESTAMPTZ",
        "headers": "BLOB",
        "payload": "BLOB",
    },
}
#: Table → column → type. `messages` is a replica or a native stream.
COLUMN_TYPES: Final = {table: {name: kind.strip() for name, kind in types.items()} for table, types in _TYPES.items()}
#: Column → description, unless `_OWN` has another one for the table.
_SHARED: Final = {
    "age_seconds": "Silence of the node at the event.",
    "as_of": "Source's time at which the row was current.",
    "blind_seconds": "Time in which lost messages hide whether nodes reported.",
    "cluster": "Cluster that holds the stream, by its name in the configuration.",
    "date": "Day, in the time zone of the table's settings.",
    "domain": "JetStream domain of the cluster.",
    "epoch": "Start of the stream's state by the source's clock, in unix nanoseconds.",
    "error": "Error, or NULL.",
    "event": "`new`, `timeout`, `recover` or `expire`.",
    "event_id": "Id of the transition, the same in every replay.",
    "event_ns": "Exact event time in unix nanoseconds.",
    "event_time": "Time at which the event became true, by the source's clock.",
    "feed": "Feed that read the advisory, as `name/stream`.",
    "final": "Whether the day is over and its data complete.",
    "first_seen": "Stored time of the node's first message.",
    "first_sequence": "First sequence of the hole.",
    "lag_messages": "Messages of the source that are not processed yet.",
    "last_seen": "Stored time of the node's newest message.",
    "last_sequence": "Last sequence of the hole.",
    "late": "Whether the event was more than one interval old when it was found.",
    "metadata": "Decoded inventory of a Choria registration.",
    "name": "Site: the `name` of the configuration entry.",
    "new_24h": "Nodes that were new within 24 hours before the watermark.",
    "node": "Sender, as the messages name it.",
    "nodes": "Nodes that are up or silent.",
    "outage_seconds": "Length of the silence that the event ended, or NULL.",
    "payload": "Payload, if it is JSON.",
    "payload_bytes": "Size of the payload.",
    "payload_raw": "Payload, if it is not JSON.",
    "previous": "Status before the event; NULL for an unknown node.",
    "received_at": "Time at which the feed's stream stored the advisory.",
    "replicator": "Replicator that watches the node.",
    "retired": "Retired nodes.",
    "returned": "Whether the new node was retired before.",
    "seen": "Sighting to which the event refers: the message itself, or the last one before the silence.",
    "sequence": "Sequence of the message in the source stream.",
    "source": "Writer of the advisory: `ours`, or `v2` or `v1` of the Stream Replicator's format.",
    "status": "`up`, `timeout` (silent) or `retired`.",
    "status_since": "Time at which the status became true, by the source's clock.",
    "stored_at": "Time at which the source stored the message.",
    "stream": "Source stream of the entry.",
    "subject": "Subject of the message.",
    "timeout": "Nodes that are silent for longer than the warning.",
    "transition": "Number of the transition, counted for each node from 1.",
    "transitions": "Transitions of the node on the day.",
    "up": "Nodes that are up.",
    "watermark": "Source's time up to which all messages are processed.",
}
_OWN: Final[Mapping[str, Mapping[str, str]]] = {
    "last_seen_nodes": {
        "last_copied": "Stored time of the newest copied message.",
        "last_sequence": "Sequence of the newest message.",
        "copied_bytes": "Size of the newest copied message.",
    },
    "retired_nodes": {
        "retired_at": "Time at which the node was retired, by the source's clock.",
        "times_retired": "How often the node was retired.",
    },
    "node_advisories": {
        "detected_at": "Watermark that found the transition.",
        "published_at": "Time at which the advisory was acknowledged; NULL until then.",
    },
    "replication": {
        "source_stream": "Name of the source stream.",
        "source_created": "Time at which the source stream was created.",
        "target_stream": "Stream that holds the copies; NULL for a feed.",
        "next_sequence": "First sequence of the source that is not processed yet.",
        "source_last_sequence": "Last sequence of the source.",
        "lag_seconds": "Age of the first message that is not processed; 0 if there is none.",
        "seen_messages": "Messages decided since the state began: copied, queued, skipped, too old or parked.",
        "copied_messages": "Messages copied since the state began.",
        "copied_bytes": "Bytes copied since the state began.",
        "skipped_messages": "Messages that sampling left out.",
        "too_old_messages": "Messages older than `max_age`, which are not copied.",
        "no_sender_messages": "Messages that name no sender.",
        "gap_messages": "Messages that the source dropped before they were read or copied.",
        "parked_messages": "Messages that the target cannot take.",
        "late_sightings": "Messages stored before the watermark when they were read.",
        "next_deadline": "Earliest time at which a silent node times out or expires.",
        "last_error": "Error of the last run, or NULL.",
        "queued_messages": "Copies that are decided but not made.",
        "paused": "Whether copying is paused.",
        "blind_seconds": "Sum of the current blind spans.",
    },
    "gaps": {
        "messages": "Sequences that the source does not hold.",
        "reason": "`deleted`, `overtaken`, `per_subject_limit`, `filtered` or `lost` (before it was copied).",
        "noticed_at": "Time at which the run noticed the hole.",
    },
    "blind_spans": {
        "since": "Start of the span, in stored time.",
        "until": "End of the span, in stored time.",
        "since_ns": "Start of the span in unix nanoseconds.",
        "until_ns": "End of the span in unix nanoseconds.",
    },
    "parked_messages": {
        "reason": "Reason for which the target cannot take the message.",
        "parked_at": "Time at which the message was parked.",
    },
    "heartbeats": {
        "name": "Site that made the hop, from the copy's headers.",
        "stream": "Source stream of the hop, from the copy's headers.",
        "subject": "Subject of the heartbeat at its origin.",
        "originator": "Sender of the heartbeat.",
        "sent_at": "Time at which it was sent, by the originator's clock.",
        "stored_at": "Time at which the hop's source stored it.",
        "arrived_at": "Time at which the hop's target stored it.",
        "seconds": "Duration of the newest hop; negative if the clocks differ.",
        "p50_seconds": "Median duration within the last hour.",
        "p95_seconds": "95th percentile of the duration within the last hour.",
        "max_seconds": "Longest duration within the last hour.",
    },
    "snapshot_info": {
        "as_of": "Time of the publication.",
        "run_id": "Run that published the file.",
        "schema_version": "Version of the published tables.",
        "generation": "Id of this file.",
    },
    "global_availability": {"name": "Site of the node; NULL if the advisory has none."},
    "global_advisories": {"name": "Site of the node; NULL if the advisory has none."},
    "global_summary": {
        "last_advisory_at": "Time of the site's last advisory.",
        "blind": "Whether the site's heartbeat is overdue.",
        "observer": "`ok`, `blind`, or `unwatched` if the site sends no heartbeat.",
        "observer_alive_at": "Time of the site's last heartbeat.",
        "watermark": "Watermark in the site's last heartbeat.",
        "position": "Position in the source, from the site's last heartbeat.",
        "lag_messages": "Lag in messages, from the site's last heartbeat.",
        "tracked_nodes": "Number of nodes in the site's last heartbeat.",
        "as_of": "Watermark of the feed.",
    },
    "global_rejects": {
        "sequence": "Sequence of the message in the feed's stream.",
        "reason": "Reason of the rejection.",
        "field": "Field that is wrong, or NULL.",
        "excerpt": "Start of the payload.",
    },
    "topology_streams": {
        "stream": "Name of the stream; NULL if the cluster cannot be queried.",
        "storage": "`file` or `memory`.",
        "replicas": "Number of replicas.",
        "placement": "Cluster and tags that the stream is placed on.",
        "consumers": "Number of consumers.",
        "messages": "Messages that the stream holds.",
        "bytes": "Size of the stream.",
        "lost": "Messages that the server reports as lost.",
        "deleted": "Deleted messages between the first and the last.",
        "leader": "Server that leads the stream.",
        "as_of": "Server's time of the report.",
        "peers": "Servers that hold the stream: `*` leads, `!` is not up to date.",
        "api_level": "JetStream API level that the stream needs.",
    },
    "topology_links": {
        "stream": "Stream that receives the messages.",
        "kind": "`mirror`, `source`, `replica` or `feed`.",
        "origin_cluster": "Cluster of the origin; NULL if the configuration does not name it.",
        "origin_stream": "Stream that the link reads.",
        "filter": "Subjects that the link takes.",
        "transforms": "Subject transforms of the link.",
        "active_seconds": "Time since the server last heard of the origin; NULL if never.",
        "lag_messages": "Messages of the origin that are not copied; NULL if unknown.",
        "lag_seconds": "Waiting time of the first message that is not copied, by the origin's clock.",
        "as_of": "Server's time of the report.",
        "sampling": "Sampling of a replica.",
        "api_prefix": "API prefix under which the origin is reached.",
        "origin_domain": "JetStream domain of the origin.",
        "dead": "Whether the link is silent, or a replica or feed has an error.",
    },
    "topology_drift": {
        "stream": "Native stream.",
        "key": "Setting that differs.",
        "wanted": "Value in the configuration.",
        "found": "Value at the server.",
        "remedy": "`updatable`, `needs_recreate` or `ignored_by_server`.",
    },
    "availability_daily": {
        "up_seconds": "Time in which the node was up.",
        "timeout_seconds": "Time in which the node was silent.",
        "retired_seconds": "Time in which the node was retired.",
        "outages": "Outages that began on the day.",
        "longest_outage_seconds": "Longest part of an outage on the day, without blind time.",
    },
    "inventory_daily": {
        "property": "`class`, `agent`, `agent_version`, `os_family` or `facts.<path>`.",
        "value": "Value of the property; NULL if unknown.",
        "nodes": "Nodes that had the value.",
        "came": "Nodes that had the value, but not on the day before.",
        "went": "Nodes that had the value on the day before, but not on this day.",
        "all_nodes": "Nodes of the day.",
    },
    "messages": {"headers": "Headers of the message.", "payload": "Payload of the message."},
}


def table_schema(table: str) -> dg.TableSchema:
    """Return the columns of a table with their types and descriptions."""
    descriptions = {**_SHARED, **_OWN.get(table, {})}
    return dg.TableSchema(
        [dg.TableColumn(name, kind, descriptions[name]) for name, kind in COLUMN_TYPES[table].items()]
    )
