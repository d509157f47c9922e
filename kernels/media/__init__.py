"""Rows of media among a step's tokens: reference."""
