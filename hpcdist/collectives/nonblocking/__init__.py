"""Nonblocking collectives: operations that progress while the caller computes.

    with engines.begin(comm, "thread") as progress:
        handle = progress.iallreduce(gradients, "ring")
        ...  # compute something else
        handle.wait()

Begin with `engines.begin` and `progress.ProgressEngine`.
"""
