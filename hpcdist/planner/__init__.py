"""Predictions before a training starts: memory, step time, energy, failures, and the best layout.

Floor 5: imports errors, arrays, reporting, comm.config, collectives, models, optim and strategies; never another
service. Pure: no MPI, no device; it reads only the files that describe clusters and models. numpy is loaded by
`calibrate` and by the simulation of a pipeline alone. `model`, `memory` and `time` hold the formulas, `plan` puts
them together, `search` tries layouts. Begin with `layout.ParallelLayout` (the question) and `plan.plan`, which
returns an `estimate.PlanEstimate`.
"""
