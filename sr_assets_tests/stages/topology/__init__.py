"""Tests of native mirrors and sources at work."""
