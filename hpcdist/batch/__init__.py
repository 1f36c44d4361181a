"""Batch jobs: the script of a training, its way to Slurm, PBS or a workstation, and what becomes of it.

Floor 5: imports comm, arrays, reporting and errors, no other package of this floor; starts no MPI, and is fast to
import on a login node. `sites` are the profiles of clusters, `schedulers` the commands of Slurm and PBS and jobs
without either, `packaging` modulefiles and wheelhouses; `carbon` chooses a begin.
Begin with `job.BatchJob` and `submission.submit`.

`requeue` decides whether a job is requeued; `hpcdist jobs end` asks it, and the block ``again`` of
``slurm/templates/slurm.j2`` carries the answer out.
"""
