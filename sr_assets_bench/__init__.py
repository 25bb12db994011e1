"""`make bench`: what replication costs on this machine, on real servers, beside other ways to move messages there.

Here: the workloads and their measurements. Not here: targets and the report (`bench_report` of the tests). Machines are
shared and noisy, so figures are read as ratios within one run.
"""
