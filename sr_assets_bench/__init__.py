"""`make bench`: the cost of replication on this machine, on real servers, compared with other ways to copy messages.

Machines are shared and noisy: read the figures as ratios within one run.
"""
