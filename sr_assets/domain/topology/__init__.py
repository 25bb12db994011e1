"""Native mirrors and sources, as rules: what is wanted, what a server reports, how they differ, how far a link is behind.

`wanted` and `found` are the records, `drift` compares them, `links` judges a link, `graph` draws them, by `dot` and `svg`.
Not here: asking a server (`stages.topology`), the keys of the configuration (`settings.topology`).
"""
