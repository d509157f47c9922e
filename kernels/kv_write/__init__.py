"""Scatter of new keys and values into the paged cache: reference, torch."""
