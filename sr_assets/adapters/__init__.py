"""The outside world: one file, one library, one outside thing; no decisions."""
