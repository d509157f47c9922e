"""Rows of numbers of 8 bits with a scale for each row: reference, triton (alone, or after a norm or activation)."""
