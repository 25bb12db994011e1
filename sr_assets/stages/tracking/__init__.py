"""Tracking: the fold, node states, advisories, snapshots, heartbeat."""
