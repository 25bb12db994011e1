"""Processes found again by a mark in the environment they were started with, whoever their parent is by then."""

import psutil


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Return every process that was started with the variable and is still there.

    One that only waits to be reaped is not. Nor is the process that set the variable itself after its start.
    """
    processes = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(variable) == value
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except psutil.Error:
            continue
    return processes
