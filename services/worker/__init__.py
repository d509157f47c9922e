"""The worker; its rooms are listed here top first."""
