"""What exists, as Dagster assets: thin over the stages."""
