"""From the copy queue, or a range of the source, to the target: `replica` plans, `batch` copies, `recover` rebuilds."""
