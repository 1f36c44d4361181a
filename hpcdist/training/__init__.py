"""Training of one run: recipe, data, assembly, loop, observers and survival of rank failures.

Floor 6: it may import every package below (strategies, checkpoint, energy, telemetry, planner, batch) and never
`hpcdist.cli`. Sub-packages from the bottom: `recipe`, `data`, `chaos`, `build`, `observe`, `run`, `elastic`; above
them `script` and `pytorch`, the doors for a user's own script, and `use_cases`, which the commands call. Begin with
`recipe.recipe.Recipe` (what a run is) and `build.trainer.Trainer` (its frozen parts, which make the steps).

One gradient from `hpcdist train` to the wire and back, with zero1 and the ring on two ranks. Start:

    hpcdist/cli/train.py                         read the recipe
    training/run/entry_point.py                  start MPI, listen for signals, prepare the run directory
    training/run/job.py                          `TrainingJob.train`: assemble, run the loop, summarise
    training/build/assemble.py                   make model, exchange, observers, executor and the list of operations
    training/run/loop.py                         for each step: read a batch, step, save when it is due
    training/build/trainer.py                    `Trainer.step`: hand the micro-batches to the executor

The step:

    strategies/schedule/executor.py              run the operations one by one: FORWARD, BACKWARD, REDUCE, AGREE, APPLY
    strategies/schedule/stages.py                the backward of one stage on one micro-batch
    models/transformer.py                        the backward of a block, layer by layer
    models/layers/linear.py                      a matrix product writes the gradient of a weight
    strategies/core/parameter_views.py           where that gradient lies in the flat store
    strategies/zero/plain.py                     `reduce`: the own shard of the sum
    strategies/zero/levels.py                    over which ranks, node by node where there are several
    collectives/sharded.py                       reduce-scatter, and all-gather, by the name of the algorithm
    collectives/algorithms/ring.py               the loop over segments: send one, receive one, add
    comm/mpi/communicator.py                     MPI_Sendrecv: the wire

And back:

    strategies/core/sharded_update.py            agree on loss and norm, clip, and update the own shard
    optim/adam.py                                the formula

then the executor's GATHER goes through plain, levels, sharded and ring once more.
"""
