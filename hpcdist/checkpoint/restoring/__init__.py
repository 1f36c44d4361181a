"""Restore a state from the shards of a checkpoint, or from the memory of other ranks, with any sharding.

Start with `restore.restore` (from files) and `reshard.reshard` (from memory).
"""
