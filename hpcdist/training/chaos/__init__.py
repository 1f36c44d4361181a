"""Fault injection: stragglers and faults made on purpose, by the ``[chaos]`` section of a recipe.

`config` is light and part of every recipe. `injection` replaces the executor and the files of a run and is without
effect where the section asks for nothing. Begin with `config.ChaosConfig` and `injection.arm_faults`.
"""
