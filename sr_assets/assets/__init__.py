"""The Dagster assets of the platform; their work is in `stages`."""
