"""Tests of the assets in Dagster."""
