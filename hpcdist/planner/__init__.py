"""Predictions before a training starts: memory, step time, energy, failures, and the best layout.

Floor 5: imports errors, arrays, reporting, comm.config, collectives, models, optim and strategies; never another
service. Pure: no MPI, no device; it reads only the files that describe clusters and models. Only `calibrate` and the
simulation of a pipeline compute with numpy. `model`, `memory` and `time` hold the formulas, `plan` puts them together,
`search` tries layouts. Begin with `layout.ParallelLayout` (the question) and `plan.plan`, which
returns an `estimate.PlanEstimate`.

From `hpcdist plan RECIPE --cluster NAME` to the printed plan, in the order in which it calls (a caller's line stands
before those of what it calls; `estimate` and `layout` are the types that all of them pass on):

    hpcdist/cli/plan/group.py                    the command: everything below is called from `command`
    hpcdist/cli/plan/options.py                  its options
    hpcdist/training/use_cases/plan_subject.py   model, layout, batch and steps, from the recipe and the options
    planner/cluster/toml_file.py                 the file of a cluster
    planner/cluster/hardware.py                  devices, nodes and links, checked
    hpcdist/training/recipe/recipe.py            the recipe, checked against all of its sections
    hpcdist/training/use_cases/recipe_plan.py    its keys as a layout
    planner/layout.py                            degrees, strategy, schedule: all that may be chosen
    planner/model/transformer.py                 the units of a model, published ones by name
    planner/model/description.py                 numbers of a unit: parameters, products, bytes
    hpcdist/models/counts.py                     the arrays and operations of a unit, as the built-in models have them
    planner/limits/checks.py                     shapes and batches that cannot be laid out
    planner/limits/unsupported.py                combinations that hpcdist does not run
    planner/plan.py                              `plan` puts the parts together; then failures and restarts of the run
    planner/memory/device.py                     the fullest device, moment by moment
    planner/model/stage_split.py                 the units of each pipeline rank
    planner/memory/model_states.py               parameters, gradients, optimizer states (ZeRO)
    planner/memory/activations.py                what a backward needs
    planner/time/step.py                         seconds of a step, term by term
    planner/time/pipeline.py                     seconds of the ranks; the bubble, in closed form or simulated
    planner/time/stage_load.py                   seconds of a stage, with its tensor collectives
    planner/time/compute.py                      seconds of a unit, from measured matrix products
    planner/time/network.py                      seconds of a message and of a collective
    planner/time/exchange.py                     seconds on the data axis, and the exposed part
    planner/time/gradient_payloads.py            bytes of gradients, compressed or not
    planner/energy.py                            power of devices, hosts and network; joules
    planner/estimate.py                          the result: terms of memory, time and energy, and what follows
    planner/report/table.py                      caveats and assumptions, the decisive ones first
    planner/report/text.py                       the printed plan
    planner/report/quantities.py                 numbers with their units

They also call, not in the list: `hpcdist.training.recipe.settings` and the dataclass of each section of a recipe,
`hpcdist.strategies.schedule` (simulates the passes of a pipeline), `hpcdist.strategies.pipeline.memory` (live
micro-batches) and `hpcdist.strategies.core.daly_interval`.
"""
