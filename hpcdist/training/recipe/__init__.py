"""Recipes: the keys of a run, their sources, validation rules, and identity.

Light: a login node reads a recipe without MPI, HDF5, numba or CuPy. Begin with `recipe.Recipe` and `recipe.load`. The
page hpcdist/docs/contributing.md describes how to add a key.
"""
