"""Causal attention over a paged cache: rows (what to attend to), reference, batched, chunked (bit-equal rows)."""
