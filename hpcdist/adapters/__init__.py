"""Adapters: models of PyTorch and JAX as models of hpcdist, trained by every strategy.

Floor 3.5: imports models, arrays and errors. Importing a module loads neither torch nor jax: `torch.arrays.library` and
`jax.parameters.library` do, once they are needed.
Begin with `torch.model.wrap` and `jax.model.wrap`.
"""
