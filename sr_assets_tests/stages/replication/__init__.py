"""Tests of `sr_assets.stages.replication`."""
