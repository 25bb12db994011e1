"""The tables of `state.duckdb`.

Times are unix nanoseconds. Hot tables have no keys or indexes: rows are found by scanning a column, which is fast, and
are never updated in place through an index. Not here: the statements that use the tables.
"""

from __future__ import annotations

from typing import Final

from sr_assets.adapters.state import copy_log, copy_queue, counters, global_view, heartbeats, nodes, snapshot_index

SCHEMA_VERSION: Final = 1

SCHEMA: Final = f"""
CREATE TABLE about (schema_version INTEGER);
CREATE TABLE streams (
    stream VARCHAR, created_ns BIGINT, next_sequence BIGINT, epoch_ns BIGINT DEFAULT 0, watermark_ns BIGINT,
    planned_ns BIGINT, last_stored_ns BIGINT, mark_sequence BIGINT, mark_ns BIGINT,
    hole_open BOOLEAN DEFAULT false, source_last_sequence BIGINT,
    lag_messages BIGINT, lag_ns BIGINT, progress_ns BIGINT, alive_ns BIGINT, alive_due_ns BIGINT, started VARCHAR,
    starts BIGINT, reset_starts BIGINT DEFAULT 0, forgotten_transition BIGINT DEFAULT 0,
    policy VARCHAR, advisories_stored BOOLEAN DEFAULT false, seen_messages BIGINT DEFAULT 0,
    skipped_messages BIGINT DEFAULT 0, too_old_messages BIGINT DEFAULT 0, no_sender_messages BIGINT DEFAULT 0,
    gap_messages BIGINT DEFAULT 0, late_sightings BIGINT DEFAULT 0, ahead_clocks BIGINT DEFAULT 0,
    last_error VARCHAR, last_error_since_ns BIGINT, as_of_ns BIGINT);
CREATE TABLE copying (
    stream VARCHAR, created_ns BIGINT, starts BIGINT, target_stream VARCHAR, target_created_ns BIGINT,
    target_sequence BIGINT, target_holds BIGINT, target_checked BIGINT, copied_messages BIGINT, copied_bytes BIGINT,
    parked_messages BIGINT, lost_messages BIGINT, error VARCHAR, error_since_ns BIGINT,
    target_looked BIGINT DEFAULT 0, target_looked_ns BIGINT DEFAULT 0);
CREATE TABLE intents (
    stream VARCHAR, first BIGINT, available BIGINT, next BIGINT, planned_ns BIGINT, cutoff_ns BIGINT, created_ns BIGINT,
    target_created_ns BIGINT, target_sequence BIGINT, resend BOOLEAN, waits BOOLEAN, folded BOOLEAN DEFAULT false,
    target_stream VARCHAR, starts BIGINT DEFAULT 0, source_sequence BIGINT, source_ns BIGINT);
CREATE TABLE nodes (
    stream VARCHAR, node VARCHAR, first_seen_ns BIGINT, seen_ns BIGINT, sequence BIGINT, copied_ns BIGINT,
    copied_bytes BIGINT, status VARCHAR, status_since_ns BIGINT, retired_at_ns BIGINT, times_retired BIGINT,
    transition BIGINT, deadline_ns BIGINT);
{nodes.SCHEMA}
CREATE TABLE transitions (
    event_id VARCHAR, stream VARCHAR, node VARCHAR, event VARCHAR, event_ns BIGINT, detected_ns BIGINT, seen_ns BIGINT,
    age_ns BIGINT, sequence BIGINT, previous VARCHAR, transition BIGINT, late BOOLEAN, returned BOOLEAN,
    outage_ns BIGINT, published_ns BIGINT, outbox BOOLEAN, epoch BIGINT DEFAULT 0);
CREATE TABLE gaps (
    stream VARCHAR, first_sequence BIGINT, last_sequence BIGINT, messages BIGINT, reason VARCHAR, noticed_ns BIGINT);
CREATE TABLE parked (
    stream VARCHAR, sequence BIGINT, stored_ns BIGINT, subject VARCHAR, payload_bytes BIGINT, reason VARCHAR,
    parked_ns BIGINT);
{snapshot_index.SCHEMA}
{copy_log.SCHEMA}
{copy_queue.SCHEMA}
{counters.SCHEMA}
{heartbeats.SCHEMA}
{global_view.SCHEMA}
"""
