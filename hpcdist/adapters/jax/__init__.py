"""JAX functions as models of hpcdist: stages are pure functions ``(params, x) -> y`` of pytrees.

Floor 3.5, inside adapters: imports models, arrays and errors; jax is imported at the first use.
Begin with `model.wrap` and `stage.JaxStage`.
"""

from hpcdist.adapters.jax.model import wrap

__all__ = ["wrap"]
