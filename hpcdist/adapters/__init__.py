"""Adapters: wrap PyTorch and JAX models as models of hpcdist, which every strategy can train.

Floor 3.5: imports models, arrays and errors; torch and jax are imported at the first use.
Begin with `torch.model.wrap` and `jax.model.wrap`.
"""
