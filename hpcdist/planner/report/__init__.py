"""Reports of plans: terminal text, tables, comparisons, warnings, JSON and plots.

Builds on the estimates of `hpcdist.planner`. Only `plot` loads matplotlib, and only to check or draw a plot. Start
reading with `text.text` (one plan) and `table.search_table` (several plans).
"""
