"""Adapters that turn PyTorch and JAX models into models of hpcdist.

Floor 3.5: imports models, arrays and errors; torch and jax at the first use. Begin with `torch.model.wrap` and
`jax.model.wrap`.
"""
