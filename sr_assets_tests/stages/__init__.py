"""Tests of `sr_assets.stages`."""
