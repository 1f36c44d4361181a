"""Sharded data parallelism: ZeRO with a degree of its own for parameters, gradients and optimizer state."""

from hpcdist.strategies.zero.exchange import ZeroExchange

__all__ = ["ZeroExchange"]
