"""Tests of when things run."""
