"""Recipes: the sections and keys of a run, their sources, validation rules, and identity.

Light: a login node reads a recipe without MPI, HDF5, numba or CuPy. Begin with `recipe.Recipe` (all sections) and
`recipe.load` (reads a file, and applies overrides, environment and site settings). The page
hpcdist/docs/contributing.md describes how to add a key.
"""
