"""Nonblocking collectives: operations that progress while the caller computes.

Floor 2: imports the blocking algorithms of collectives, and comm.

    with engines.begin(comm, "thread") as progress:
        handle = progress.iallreduce(gradients, "ring")
        ...  # compute something else
        handle.wait()

Begin with `engines.begin` and `progress.ProgressEngine`.
"""
