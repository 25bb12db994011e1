"""Tests of `sr_assets.domain`."""
