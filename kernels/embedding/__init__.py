"""Rows of a table by id: reference."""
