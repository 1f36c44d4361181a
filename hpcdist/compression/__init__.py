"""Compressors as pure maths on arrays, values to bytes and back: they know no rank and send no message."""
