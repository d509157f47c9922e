"""Tests; tests/README.md has the map and the time budget."""
