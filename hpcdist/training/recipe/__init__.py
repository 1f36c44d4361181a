"""Recipes: the sections and keys of a run, their sources, the rules between them, and their identity.

Light: a login node reads a recipe without MPI, HDF5, numba or CuPy. It imports the errors, `reporting`, and the
`config` modules of the packages below, whose dataclasses a recipe is composed of. Begin with `recipe.Recipe` (all
sections) and `recipe.load` (a file under overrides, environment and site).

A new key is a field of its section's dataclass in the package that acts on it (`optim.config`, `zero.config`, ...), its
range in the RULES beside that, its rules with other sections in `strategies.rules`, its meaning in ``keys.toml``, and a
line in README.md; `python -m hpcdist.training.recipe.reference > hpcdist/docs/recipe.md` renews the page of all keys.
"""
