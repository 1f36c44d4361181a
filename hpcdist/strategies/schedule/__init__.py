"""A training step as a list of operations: generators of schedules, proof, simulation and executor.

Floor 4. `generate` makes the lists, `verify` proves them, `simulate` times them without a model, and `executor` runs
one rank's list. Begin with `strategies.core.operations.Operation` and `executor.Executor`.
"""
