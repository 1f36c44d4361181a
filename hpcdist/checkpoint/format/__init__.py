"""On-disk format of a checkpoint: manifest, shards, index for other tools, and the verified reader of blocks.

Floor 5, below `saving`, `restoring`, `partner` and `convert`: imports arrays, hdf5, comm and errors. A restore reads
the manifest and byte ranges of shards, without libhdf5. Start with `manifest.Manifest` and `shard.write`.
"""
