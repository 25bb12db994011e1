"""One writer's work on a batch: `plan` (what to copy), `copier` (how), `receipt` (what became of it)."""
