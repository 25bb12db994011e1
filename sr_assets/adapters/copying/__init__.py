"""One writer's work on a batch: `plan` (the input), `copier`, `fetching` and `sending` (the work), `receipt` (the result)."""
