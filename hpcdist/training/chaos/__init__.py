"""Fault injection: deliberate stragglers and faults, set by the ``[chaos]`` section of a recipe.

`config` is light and part of every recipe. `injection` slows a rank down, corrupts its numbers and makes file writes
fail. May import `strategies`, `checkpoint` and the packages below. Begin with `config.ChaosConfig` and
`injection.FaultInjector`.
"""
