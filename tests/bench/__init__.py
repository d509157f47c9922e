"""Measurements; run by hand with `make bench`."""
