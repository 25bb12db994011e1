"""Native mirrors and sources: survey of every cluster, lag of each link, evaluation, planning and applying."""
