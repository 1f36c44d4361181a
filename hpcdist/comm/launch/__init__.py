"""Launch of ranks: launchers and their command lines, supervision of a job, its exit code and restarts.

Part of comm (floor 1). Nothing here imports mpi4py, and all but the supervisor is light: a login node imports it.
`environment` reads what a launcher told a rank; the rest runs in `hpcdist run`, before and around the ranks.
Begin with `launchers.choose_starter` and `supervisor.watch`.
"""
