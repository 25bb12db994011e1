"""Sensors, jobs and schedules, which start all runs.

A lag sensor (`sensors`) observes its site (`observing`), decides whether it needs a run (`decisions`) and acquires a run slot
for the site's job (`jobs`).
"""
