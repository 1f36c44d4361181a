"""Predictions before a training starts: memory, step time, energy, failures, and the best layout.

Pure: no MPI and no device. Start reading with `layout.ParallelLayout` (the input) and `plan.plan`, which returns an
`estimate.PlanEstimate`. `hpcdist plan` uses, in this order: `cluster`, `layout` and `kernels` (the program), `model`
(units of a model, and their split over ranks), `checks`, `plan` (also energy and failures), `memory`, `time` (of a
step), `report`.
"""
