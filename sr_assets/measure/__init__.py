"""Measurements of a fleet: suites, their result files, the report."""
