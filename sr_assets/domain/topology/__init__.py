"""Native mirrors and sources, as rules: what is wanted, what a server reports, how they differ, how far a link is behind.

`wanted` and `found` are the records, `drift` compares them, `plan` decides what is done,
`links` judges a link, `graph` makes links a graph, `dot` and `svg` draw it.
Not here: asking a server (`stages.topology`), the keys of the configuration (`settings.topology`).
"""
