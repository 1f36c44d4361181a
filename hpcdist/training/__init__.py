"""Training: the recipe, the data, the loop, and how a run survives."""
