"""Copying from the queue, or from a range of the source, to the target: `replica` plans, `batch` copies, `recover`
rebuilds.
"""
