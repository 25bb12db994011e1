"""Tests of native mirrors and sources on real servers."""
