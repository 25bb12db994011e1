"""A Dagster project with an asset of its own and the platform as a component."""
