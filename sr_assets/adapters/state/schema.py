"""The tables of `state.duckdb`, and the statements that upgrade an earlier schema.

Times are unix nanoseconds. Hot tables have no keys or indexes: rows are found by scanning a column, which is fast, and
are never updated in place through an index. Not here: the statements that use the tables.
"""

from __future__ import annotations

from typing import Final

from sr_assets.adapters.state import copy_log, copy_queue, counters, global_view, heartbeats, nodes, snapshot_index

SCHEMA_VERSION: Final = 7

SCHEMA: Final = f"""
CREATE TABLE IF NOT EXISTS about (schema_version INTEGER);
CREATE TABLE IF NOT EXISTS streams (
    stream VARCHAR, created_ns BIGINT, next_sequence BIGINT, epoch_ns BIGINT DEFAULT 0, watermark_ns BIGINT,
    planned_ns BIGINT, last_stored_ns BIGINT, mark_sequence BIGINT, mark_ns BIGINT,
    hole_open BOOLEAN DEFAULT false, source_last_sequence BIGINT,
    lag_messages BIGINT, lag_ns BIGINT, progress_ns BIGINT, alive_ns BIGINT, alive_due_ns BIGINT, started VARCHAR,
    starts BIGINT, reset_starts BIGINT DEFAULT 0, forgotten_transition BIGINT DEFAULT 0,
    policy VARCHAR, advisories_stored BOOLEAN DEFAULT false, seen_messages BIGINT DEFAULT 0,
    skipped_messages BIGINT DEFAULT 0, too_old_messages BIGINT DEFAULT 0, no_sender_messages BIGINT DEFAULT 0,
    gap_messages BIGINT DEFAULT 0, late_sightings BIGINT DEFAULT 0, ahead_clocks BIGINT DEFAULT 0,
    last_error VARCHAR, last_error_since_ns BIGINT, as_of_ns BIGINT);
CREATE TABLE IF NOT EXISTS copying (
    stream VARCHAR, created_ns BIGINT, starts BIGINT, target_stream VARCHAR, target_created_ns BIGINT,
    target_sequence BIGINT, target_holds BIGINT, target_checked BIGINT, copied_messages BIGINT, copied_bytes BIGINT,
    parked_messages BIGINT, lost_messages BIGINT, error VARCHAR, error_since_ns BIGINT,
    target_looked BIGINT DEFAULT 0, target_looked_ns BIGINT DEFAULT 0);
CREATE TABLE IF NOT EXISTS intents (
    stream VARCHAR, first BIGINT, available BIGINT, next BIGINT, planned_ns BIGINT, cutoff_ns BIGINT, created_ns BIGINT,
    target_created_ns BIGINT, target_sequence BIGINT, resend BOOLEAN, waits BOOLEAN, folded BOOLEAN DEFAULT false,
    target_stream VARCHAR, starts BIGINT DEFAULT 0, source_sequence BIGINT, source_ns BIGINT);
CREATE TABLE IF NOT EXISTS nodes (
    stream VARCHAR, node VARCHAR, first_seen_ns BIGINT, seen_ns BIGINT, sequence BIGINT, copied_ns BIGINT,
    copied_bytes BIGINT, status VARCHAR, status_since_ns BIGINT, retired_at_ns BIGINT, times_retired BIGINT,
    transition BIGINT, deadline_ns BIGINT);
{nodes.SCHEMA}
CREATE TABLE IF NOT EXISTS transitions (
    event_id VARCHAR, stream VARCHAR, node VARCHAR, event VARCHAR, event_ns BIGINT, detected_ns BIGINT, seen_ns BIGINT,
    age_ns BIGINT, sequence BIGINT, previous VARCHAR, transition BIGINT, late BOOLEAN, returned BOOLEAN,
    outage_ns BIGINT, published_ns BIGINT, outbox BOOLEAN, epoch BIGINT DEFAULT 0);
CREATE TABLE IF NOT EXISTS gaps (
    stream VARCHAR, first_sequence BIGINT, last_sequence BIGINT, messages BIGINT, reason VARCHAR, noticed_ns BIGINT);
CREATE TABLE IF NOT EXISTS parked (
    stream VARCHAR, sequence BIGINT, stored_ns BIGINT, subject VARCHAR, payload_bytes BIGINT, reason VARCHAR,
    parked_ns BIGINT);
{snapshot_index.SCHEMA}
{copy_log.SCHEMA}
{copy_queue.SCHEMA}
{counters.SCHEMA}
{heartbeats.SCHEMA}
{global_view.SCHEMA}
"""

_FROM_1: Final = """
ALTER TABLE streams ADD COLUMN target_checked BIGINT DEFAULT 0;
ALTER TABLE streams ADD COLUMN progress_ns BIGINT;
ALTER TABLE streams ADD COLUMN alive_ns BIGINT;
ALTER TABLE streams ADD COLUMN alive_due_ns BIGINT;
UPDATE streams SET target_checked = target_sequence;
ALTER TABLE intents ADD COLUMN resend BOOLEAN DEFAULT false;
ALTER TABLE intents ADD COLUMN waits BOOLEAN DEFAULT false;
CREATE TABLE IF NOT EXISTS global_nodes (
    feed VARCHAR, replicator VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR, transition BIGINT, event_ns BIGINT,
    cycle TINYINT, seen_ns BIGINT, origin VARCHAR, received_ns BIGINT);
CREATE TABLE IF NOT EXISTS global_history (
    feed VARCHAR, event_id VARCHAR, replicator VARCHAR, name VARCHAR, stream VARCHAR, node VARCHAR, cycle TINYINT,
    event_ns BIGINT, received_ns BIGINT, seen_ns BIGINT, age_seconds DOUBLE, previous VARCHAR, transition BIGINT,
    late BOOLEAN, returned BOOLEAN, outage_seconds DOUBLE, origin VARCHAR);
"""
# The copying gets a row of its own; an open intent of a tracked stream is folded first, with its own range and cut-off.
_FROM_2: Final = f"""
CREATE TABLE copying AS SELECT
    stream, created_ns, coalesce(starts, 0) AS starts, NULL::VARCHAR AS target_stream, target_created_ns,
    target_sequence, target_holds, target_checked, copied_messages, copied_bytes, parked_messages,
    0::BIGINT AS lost_messages, NULL::VARCHAR AS error, NULL::BIGINT AS error_since_ns FROM streams;
ALTER TABLE streams DROP COLUMN target_created_ns;
ALTER TABLE streams DROP COLUMN target_sequence;
ALTER TABLE streams DROP COLUMN target_holds;
ALTER TABLE streams DROP COLUMN target_checked;
ALTER TABLE streams DROP COLUMN copied_messages;
ALTER TABLE streams DROP COLUMN copied_bytes;
ALTER TABLE streams DROP COLUMN parked_messages;
ALTER TABLE streams ADD COLUMN epoch_ns BIGINT DEFAULT 0;
ALTER TABLE streams ADD COLUMN mark_sequence BIGINT;
ALTER TABLE streams ADD COLUMN mark_ns BIGINT;
ALTER TABLE streams ADD COLUMN hole_open BOOLEAN DEFAULT false;
ALTER TABLE streams ADD COLUMN reset_starts BIGINT DEFAULT 0;
ALTER TABLE streams ADD COLUMN forgotten_transition BIGINT DEFAULT 0;
ALTER TABLE streams ADD COLUMN policy VARCHAR;
ALTER TABLE streams ADD COLUMN advisories_stored BOOLEAN DEFAULT false;
ALTER TABLE streams ADD COLUMN ahead_clocks BIGINT DEFAULT 0;
ALTER TABLE intents ADD COLUMN folded BOOLEAN DEFAULT false;
ALTER TABLE intents ADD COLUMN target_stream VARCHAR;
ALTER TABLE intents ADD COLUMN starts BIGINT DEFAULT 0;
UPDATE intents SET starts = coalesce((SELECT starts FROM streams WHERE streams.stream = intents.stream), 0);
ALTER TABLE transitions ADD COLUMN epoch BIGINT DEFAULT 0;
ALTER TABLE staged ADD COLUMN mark VARCHAR DEFAULT '';
{global_view.MIGRATION}
"""
_FROM_3: Final = """
ALTER TABLE intents ADD COLUMN source_sequence BIGINT;
ALTER TABLE intents ADD COLUMN source_ns BIGINT;
"""
_FROM_5: Final = """
ALTER TABLE copying ADD COLUMN target_looked BIGINT DEFAULT 0;
ALTER TABLE copying ADD COLUMN target_looked_ns BIGINT DEFAULT 0;
"""
#: Schema version → the statements that make the next one of it; tables that are new in the last one are in `SCHEMA`.
MIGRATIONS: Final = {
    1: _FROM_1,
    2: _FROM_2,
    3: _FROM_3,
    4: snapshot_index.MIGRATION,
    5: _FROM_5,
    6: f"{counters.SCHEMA}{heartbeats.SCHEMA}{nodes.MIGRATION}",
}
