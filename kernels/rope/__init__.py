"""Rotary position embedding: reference."""
