"""One writer's work on a batch: `copy_plan` (input), `copier`, `receipt` (result), and `fence` for writers on other machines."""
