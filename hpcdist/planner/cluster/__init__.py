"""Clusters in numbers: devices, links, storage, power, failures and prices, read from TOML files.

Lowest part of the planner, beside `layout`: imports errors and reporting only. Begin with `hardware.Cluster` (the
numbers) and `toml_file.read`.
"""
