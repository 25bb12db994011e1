"""Tests of `sr_assets.adapters.wire`."""
