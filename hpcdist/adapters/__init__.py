"""Models of other libraries as models of this one: `hpcdist.adapters.torch` and `hpcdist.adapters.jax`."""
