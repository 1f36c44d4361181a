"""Launch of ranks: launchers and their command lines, supervision of a job, its exit code and restarts.

Part of comm (floor 1). Nothing here imports mpi4py, so it works on a login node. `environment` reads the launcher's
variables on a rank; the rest runs in `hpcdist run`. Begin with `launchers.choose_starter` and `supervisor.Supervision`.
"""
