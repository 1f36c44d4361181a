"""Measuring many configurations: sweeps of whole trainings, each in processes of its own, and the report of a sweep."""
