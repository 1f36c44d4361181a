"""Restore a state from the shards of a checkpoint, or from the memory of other ranks, with any sharding.

Floor 5, inside checkpoint: imports `format`, the listing, comm and arrays. Start with `restore.restore` (from files)
and `reshard.reshard` (from memory).
"""
