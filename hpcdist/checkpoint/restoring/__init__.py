"""Restore a state: from the shards of a checkpoint, or from the memory of other ranks, in any partition.

Below `hpcdist.training`; imports `format` and the listing. Named `restoring` to pair with `saving`.
Begin with `restore.restore` (from files) and `reshard.reshard` (from memory).
"""
