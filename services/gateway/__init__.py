"""The gateway; its rooms are listed here top first."""
