"""Optimizers as pure maths on ranges of the flat space: they know no rank and send no message."""
