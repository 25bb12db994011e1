"""Tests of `sr_assets.stages.tracking`."""
