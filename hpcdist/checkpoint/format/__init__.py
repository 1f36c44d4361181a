"""On-disk format of a checkpoint: manifest, shards, index for other tools, and the verified reader of blocks.

Floor 5, below `saving`, `restoring`, `partner` and `convert`: imports arrays, hdf5, comm and errors. A restore needs
the manifest and byte ranges of shards, and never opens them through libhdf5.
Begin with `manifest.Manifest` and `shard.write`.
"""
