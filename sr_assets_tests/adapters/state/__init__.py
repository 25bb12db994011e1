"""Tests of `sr_assets.adapters.state`."""
