"""One run of a site without Dagster: the work behind each asset."""
