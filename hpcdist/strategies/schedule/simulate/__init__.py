"""Simulation of a step: the time of every operation on every rank, from given costs, without a model.

Floor 4. `passes` translates passes into arrays, `program` runs them (compiled), `timeline` computes stage times,
bubbles and the critical path. Begin with `timeline.simulate_passes`.
"""
