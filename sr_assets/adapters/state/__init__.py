"""A site's private state: lock, `state.duckdb`, status."""
