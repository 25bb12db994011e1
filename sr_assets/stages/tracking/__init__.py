"""The fold, node state, advisories, snapshots, heartbeat."""
