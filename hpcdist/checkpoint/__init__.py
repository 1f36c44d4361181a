"""Checkpoints: one shard per writer and a manifest, saved on any number of ranks and restored on any other.

Floor 5: imports models and everything below, no other package of this floor. `format` is what lies on the disk,
`saving` and `restoring` the two directions, `partner` the copies in memory that survive the death of a rank,
`convert` files of other formats; beside them are the directory, its lock, listing, verification, pruning and
striping. Begin with `saving.two_phase.save` and `restoring.restore.restore`.
"""
