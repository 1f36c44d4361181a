"""A training step as a list of operations: generators of schedules, proof, simulation and executor.

Floor 4. `passes`, `registry` and `operation_list` make the lists, `verify` proves them, `timeline` computes their times
without a model, and `executor` runs one rank's list. Begin with `strategies.core.operations.Operation` and
`executor.Executor`.
"""
