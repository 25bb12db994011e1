"""Processes identified by a variable of their environment, independently of their parents."""

import psutil


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Return every live process that was started with the variable, without zombies.

    A process that set the variable after its own start is not included.
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
