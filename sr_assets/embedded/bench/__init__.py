"""`make bench`: what replication costs on this machine, on real servers, beside what else moves messages there.

Here: the workloads and their measurements. Not here: any assertion: machines are shared and noisy, so figures are read as
ratios within one run.
"""
