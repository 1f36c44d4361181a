"""Data parallelism in lock-step: an exchange is composed of a reducer, a gatherer and an update.

Start with `catalogue`, which maps each strategy to its parts, and lists the files on the path of a gradient.
"""
