"""A training step as a list of operations: generators of schedules, proof, simulation and executor.

Floor 4; imports core and pipeline, never a strategy. `generate` makes the lists, `verify` proves the lists of all
ranks, `simulate` times them without a model, and `executor` runs one rank's list. Begin with `operations.Operation`,
the entry of a list, and `executor.Executor`.
"""
