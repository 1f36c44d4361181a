"""Reports of plans: text for a terminal, tables, comparisons, caveats and pictures.

Imports all of the planner but `calibrate` (the types of `search` for annotations only). matplotlib is loaded by
`plot` alone, when it draws. Begin with `text.text` (one plan) and `table.search_table` (several).
"""
