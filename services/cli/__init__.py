"""The `triptych` command; its rooms are listed here top first."""
