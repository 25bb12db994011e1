"""Native mirrors and sources at work: looking at every cluster, measuring each link's lag, planning and applying.

`looking` asks, `lagging` measures, `report` makes rows of both, `planning` and `applying` change streams. Not here: the rules
(`domain.topology`).
"""
