"""From the copy queue to the target: plan, batch, target, recover."""
