"""Nonblocking collectives: operations that proceed while the caller computes.

Floor 2: imports the blocking algorithms of collectives, and comm.

    with engines.begin(comm, "thread") as progress:
        handle = progress.iallreduce(gradients, "ring")
        ...  # compute something else
        handle.wait()

Begin with `engines.begin` and `progress.ProgressEngine`, whose `ireduce_scatter` and `iall_gather` are the two
halves.
"""
