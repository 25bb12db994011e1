"""Native mirrors and sources at work: looking at every cluster, measuring each link's lag, planning and applying.

`looking` asks, `lagging` measures, `report` makes rows of both, `watching` judges and publishes them,
`planning` compares, `applying` changes streams, `trying` is for `check --connect`. Not here: the rules
(`domain.topology`).
"""
