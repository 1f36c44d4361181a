"""Training of a run: recipe, data, assembly, loop, observers and survival of rank failures.

Floor 6: may import every package below, never `hpcdist.cli`. Sub-packages from the bottom: `recipe`, `data`,
`build`, `observe`, `run`; above them `script`, `pytorch` and `use_cases`. Begin with `recipe.recipe.Recipe`
(settings) and `build.trainer.Trainer` (steps).

Route of one gradient from `hpcdist train` to the network, and its update (zero1, ring algorithm):

    training/run/entry_point.py            start MPI, and prepare the run directory
    training/build/assemble.py             make model, exchange, executor and operation list
    training/run/loop.py                   for each step: read a batch, step, save if due
    training/build/trainer.py              `Trainer.step`: pass the micro-batches to the executor
    strategies/schedule/executor.py        run the operations
    models/layers/linear.py                a matrix product writes the gradient of a weight
    strategies/core/parameter_views.py     the gradient's range in the flat store
    strategies/data/catalogue.py           `zero`: the reducer, gatherer and update of the strategy
    strategies/data/exchange.py            `DataExchange`: the handlers of all operations
    strategies/data/reducers.py            `Scatter.reduce`: sum the layer's gradients into this rank's shard
    strategies/data/cuts.py                `Cuts.sum`: over the ranks of each level
    collectives/sharded.py                 reduce-scatter, by the name of the algorithm
    collectives/algorithms/ring.py         for each segment: send one, receive one, add
    comm/mpi/communicator.py               MPI_Sendrecv
    strategies/core/sharded_update.py      the update of the shard, after the ranks agreed on loss and norm
    optim/optimizer.py                     the formula of the optimizer
"""
