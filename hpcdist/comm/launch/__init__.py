"""Launch of ranks: launchers and their command lines, supervision of a job, its exit code and restarts.

Part of comm (floor 1). Nothing here imports mpi4py, so that it also works on a login node. `environment` reads the
variables that a launcher sets for a rank; the rest runs in `hpcdist run`, before and around the ranks.
Begin with `launchers.choose_starter` and `supervisor.Supervision`.
"""
