"""Predictions before a training starts: memory, step time, energy, failures, and the best layout.

Pure: no MPI and no device. Only `calibrate` and the pipeline simulator use numpy. Start reading with
`layout.ParallelLayout` (the input) and `plan.plan`, which returns an `estimate.PlanEstimate`. `hpcdist plan` uses the
modules in this order:

    cluster/       toml_file reads a cluster; hardware: devices, nodes and links
    layout.py      parallel degrees, strategy, schedule
    model/         transformer: units of a model; stage_split
    limits/        checks: impossible layouts; unsupported: layouts that hpcdist cannot run
    plan.py        combines all parts; failures and restarts of the run
    memory/        device: memory peak; model_states: ZeRO; activations
    time/          seconds of a step
    energy.py      joules of a step
    report/        the printed plan
"""
