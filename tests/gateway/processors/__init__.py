"""Tests of what a model makes of media."""
