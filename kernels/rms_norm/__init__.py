"""Root mean square norm of the last axis: reference, torch."""
