"""A training step as a list of operations: generators of schedules, proof, simulation, and the executor.

Floor 4; imports core and pipeline of the strategies, never a strategy. Packages: `generate` makes the lists, `verify`
proves those of all ranks, `simulate` times them without a model; `executor` runs that of this rank. Begin with
`operations.Operation`, the entry of a list, and `executor.Executor`.
"""
