"""The gated activation: reference."""
