"""Clusters in numbers: devices, links, storage, power, failures and prices, read from TOML files.

Start reading with `hardware.Cluster` and `toml_file.read`.
"""
