"""One writer's work on a batch: the plan, the copier, its receipt."""
