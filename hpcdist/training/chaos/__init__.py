"""Fault injection: stragglers and faults made on purpose, by the ``[chaos]`` section of a recipe.

`config` is light and part of every recipe; `injection` has the observers of the executor that slow it down and damage
its numbers, and the files that fail. Without the section there are none. It may import `strategies`, `checkpoint` and
what is below them, and nothing else of training. Begin with `config.ChaosConfig` and `injection.FaultInjector`.
"""
