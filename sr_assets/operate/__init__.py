"""Processes around Dagster: its instance, the services of `sr-assets up`, the runs of `sr-assets run`."""
