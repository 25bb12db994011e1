"""Tests of one writer's work, against real servers."""
