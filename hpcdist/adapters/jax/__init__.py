"""JAX functions as models of hpcdist: stages are pure functions ``(params, x) -> y`` of pytrees.

Begin with `model.wrap` and `stage.JaxStage`.
"""

from hpcdist.adapters.jax.model import wrap

__all__ = ["wrap"]
