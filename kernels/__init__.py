"""Every op of the worker: a plain torch reference and its fast implementations, one folder each."""
