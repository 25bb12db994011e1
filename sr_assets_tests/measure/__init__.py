"""Tests, by the same names as the code they test."""
