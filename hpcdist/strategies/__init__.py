"""Architectures of distributed training: the only place where maths meets messages."""
