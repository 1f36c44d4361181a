"""Launch of ranks: launchers and their command lines, supervision of a job, its exit code and restarts.

Nothing here imports mpi4py. `environment` reads variables on a rank; the other modules run in `hpcdist run`. Begin with
`launchers.choose_starter` and `supervisor.Supervision`.
"""
