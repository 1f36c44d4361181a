"""Adapters: models of PyTorch and JAX as models of hpcdist, trained by every strategy.

Floor 3.5: imports models, arrays and errors. Importing a module loads neither torch nor jax: `arrays.library` of each
adapter does, once it is needed.
Begin with `torch.model.wrap` and `jax.model.wrap`.
"""
