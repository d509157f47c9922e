"""The engine; its rooms are listed here top first."""
