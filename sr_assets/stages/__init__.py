"""One run of a site: what each asset does when it is materialised, without Dagster."""
