"""Training of a run: recipe, data, assembly, loop, observers and survival of rank failures.

Floor 6: may import every package below, never `hpcdist.cli`. Sub-packages from the bottom: `recipe`, `data`, `chaos`,
`build`, `observe`, `run`, `elastic`; above them `script` and `pytorch` (for a user's own script) and `use_cases` (for
the commands). Begin with `recipe.recipe.Recipe` (the settings of a run) and `build.trainer.Trainer` (makes the steps).

Route of one gradient from `hpcdist train` to the network, and its update (zero1, ring algorithm):

    training/run/entry_point.py            start MPI, and prepare the run directory
    training/build/assemble.py             make model, exchange, observers, executor and the operation list
    training/run/loop.py                   for each step: read a batch, step, save if a checkpoint is due
    training/build/trainer.py              `Trainer.step`: pass the micro-batches to the executor
    strategies/schedule/executor.py        run the operations one by one
    models/layers/linear.py                a matrix product writes the gradient of a weight
    strategies/core/parameter_views.py     the range of this gradient in the flat store
    strategies/zero/exchange.py            `ZeroExchange`: the exchange, composed of several classes
    strategies/zero/overlap.py             `reduce`: start it in the background if overlap is on
    strategies/zero/plain.py               `reduce`: sum the gradient into this rank's shard
    collectives/sharded.py                 reduce-scatter and all-gather, by the name of the algorithm
    collectives/algorithms/ring.py         the loop over segments: send one, receive one, add
    comm/mpi/communicator.py               MPI_Sendrecv: the network
    strategies/core/sharded_update.py      agree on loss and norm, clip, and update this rank's shard
    optim/adam.py                          the formula of the optimizer
"""
