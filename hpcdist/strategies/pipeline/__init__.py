"""Pipeline parallelism: the partition of a model's units over pipeline ranks, and tied tensors.

Floor 4; imports core and schedule of the strategies. `costs` has the costs of the units, in closed form or measured,
`memory` the bytes of a rank, `partition` finds the cut, `plan` does it all for a recipe and makes the table. The
order of the work is in `hpcdist.strategies.schedule`. Begin with `plan.plan` and `partition.partition`.
"""
