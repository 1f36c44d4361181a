"""Pipeline parallelism: the partition of a model's units over pipeline ranks, and tied tensors.

Floor 4; imports core and schedule. `costs` has the costs of units, computed or measured, `memory` the bytes of a rank,
`partition` finds the cut, and `plan` combines them for a recipe. Schedules are in `hpcdist.strategies.schedule`. Begin
with `plan.plan` and `partition.partition`.
"""
