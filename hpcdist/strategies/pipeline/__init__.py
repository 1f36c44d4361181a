"""Pipeline parallelism: the partition of a model's units over pipeline ranks, and tied tensors.

Floor 4. `plan` combines the costs of units (`costs`), the bytes of a rank (`memory`) and the search for the best cut
(`partition`). Begin with `plan.plan` and `partition.partition`.
"""
