"""Pipeline parallelism: the partition of a model's units over pipeline ranks, and tied tensors.

Floor 4; imports core and schedule of the strategies. Costs of the units come in closed form (`costs`) or are measured
(`measured`), `memory` says what fits on a rank, `partition` finds the cut, `plan` does it all for a recipe and makes
the table. The order of the work is in `hpcdist.strategies.schedule`. Begin with `plan.plan` and
`partition.partition`.
"""
