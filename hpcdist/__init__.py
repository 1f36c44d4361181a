"""MPI-native toolkit for distributed training; importing it starts neither MPI nor CUDA."""

__version__ = "0.2.0"
