"""How many CPU threads torch may use.

OpenMP threads that share a busy core wait for each other in spin loops and can fall to a hundredth of their speed. Half
the cores leave room for the graders and for a neighbour; and the choice depends on the machine alone, not on its load
of the moment, because another number of threads sums in another order and gives other last bits.
"""

import os


def choose_threads(requested: int, cores: int | None = None, *, processes: int = 1) -> int:
    """Threads for torch: `requested` when above 0, else each process's part of half of `cores`.

    `cores` defaults to those this process may use.
    """
    if requested > 0:
        return requested
    cores = cores if cores is not None else len(os.sched_getaffinity(0))
    return max(1, cores // (2 * processes))
