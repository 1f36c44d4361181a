"""Fault injection: deliberate stragglers and faults, set by the ``[chaos]`` section of a recipe.

May import `strategies`, `checkpoint` and the packages below. Begin with `config.ChaosConfig` and
`injection.FaultInjector`.
"""
