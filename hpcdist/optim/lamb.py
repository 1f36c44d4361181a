"""Layer-wise adaptive moments for large batches."""

from typing import ClassVar

from hpcdist.optim.adamw import AdamW


class Lamb(AdamW):
    """LAMB: You et al. 2020 (arXiv:1904.00962), Algorithm 2: the direction of AdamW, scaled by tensor.

    w -= rate (||w|| / ||u||) u, with u of `AdamW`, bias correction and decay included, and both norms over the whole
    tensor, whatever part of it a rank owns. Choices: phi is the identity, so the ratio is not clipped; it is 1 when
    either norm is 0, and for tensors that are not adapted, which have no decay either. The gradient is not normalised
    beforehand, unless clipping by the global norm does so.
    """

    needs_norms: ClassVar[bool] = True

    def _ratio(self, weight_norm: float, step_norm: float) -> float:
        return weight_norm / step_norm if weight_norm > 0.0 and step_norm > 0.0 else 1.0
