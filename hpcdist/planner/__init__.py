"""Predictions before a training starts: memory, step time, energy, failures, and the best layout.

Floor 5: imports errors, arrays, reporting, comm.config, collectives, models, optim and strategies; never another
service. Pure: no MPI, no device; it reads only the files that describe clusters and models. numpy is loaded by
`calibrate` and by the simulation of a pipeline alone. `model`, `memory` and `time` hold the formulas, `plan` puts
them together, `search` tries layouts. Begin with `layout.ParallelLayout` (the question) and `plan.plan`, which
returns an `estimate.PlanEstimate`.

From `hpcdist plan RECIPE --cluster NAME` to the printed plan:

    hpcdist/cli/plan/group.py                    the command
    hpcdist/cli/plan/options.py                  its options
    hpcdist/cli/plan/subject.py                  model, layout, batch and steps from recipe and options
    hpcdist/training/recipe/recipe.py            the recipe
    hpcdist/training/use_cases/recipe_plan.py    its keys as a layout
    planner/layout.py                            the degrees, and all else that may be chosen
    planner/cluster/toml_file.py                 the file of a cluster
    planner/cluster/hardware.py                  devices, nodes and links
    planner/model/transformer.py                 the units of a model, published ones by name
    planner/model/description.py                 numbers of a unit: parameters, products, bytes
    planner/limits/checks.py                     shapes and batches that cannot be laid out
    planner/limits/unsupported.py                combinations that hpcdist does not run
    planner/plan.py                              put all parts together; failures and restarts of the run
    planner/model/stage_split.py                 which units each pipeline rank has
    planner/memory/device.py                     the fullest device, moment by moment
    planner/memory/model_states.py               parameters, gradients, optimizer states (ZeRO)
    planner/memory/activations.py                what a backward needs
    hpcdist/models/counts.py                     the same, counted of the built-in models
    planner/time/step.py                         seconds of a step, part by part
    planner/time/compute.py                      seconds of a unit, from measured matrix products
    planner/time/stage_load.py                   seconds of a stage, with its tensor collectives
    planner/time/network.py                      seconds of a message and of a collective
    planner/time/gradient_payloads.py            bytes of gradients, compressed or not
    planner/time/exchange.py                     seconds on the data axis, and what of them is exposed
    planner/time/pipeline.py                     the bubble: closed forms, or the simulator
    planner/energy.py                            power of devices, hosts and network; joules
    planner/estimate.py                          the result
    planner/report/table.py                      what the reader must know: caveats and assumptions
    planner/report/text.py                       the printed plan
    planner/report/quantities.py                 numbers with their units
"""
