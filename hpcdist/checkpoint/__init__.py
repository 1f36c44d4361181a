"""Checkpoints: one shard per rank and a manifest, saved on any number of ranks and restored on any other."""
