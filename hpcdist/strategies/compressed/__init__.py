"""Exchanges that send compressed gradients: where the compressors of `hpcdist.compression` meet messages."""
