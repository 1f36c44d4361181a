"""On-disk format of a checkpoint: manifest, shards, index, and the verified reader of blocks.

Floor 5, below `saving`, `restoring`, `partner` and `convert`: imports arrays, hdf5, comm and errors. Start with
`manifest.Manifest` and `shard.write`.
"""
