"""Simulation of a step: the time of every operation on every rank, from given costs instead of a model.

Floor 4; imports the operations, the placement and the grid. `passes` translates passes into arrays, `program` runs
them (compiled), `timeline` translates lists, and reads stages, bubbles and the critical path off the result. Begin
with `timeline.simulate_passes` and `program.StepCosts`.
"""
