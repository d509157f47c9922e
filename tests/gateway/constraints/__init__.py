"""Tests of what an answer must follow."""
