"""Joules of a run: energy counters of GPUs and processors, read by one rank of each node, attributed to phases."""
