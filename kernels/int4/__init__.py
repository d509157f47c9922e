"""Weights of 4 bits beside activations of 16: reference (the format, and its rounding), triton (the product)."""
