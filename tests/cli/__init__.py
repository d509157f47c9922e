"""Tests of the `triptych` command."""
