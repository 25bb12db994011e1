"""One writer's work on a batch: `plan` (input), `copier`, `fetching`, `sending`, and `receipt` (result)."""
