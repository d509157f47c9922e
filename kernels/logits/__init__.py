"""Edits of logits before a token is chosen, on a GPU. The specification is services/worker/sampling: masks, bias,
penalties.

record      what one request asks, as words in device memory, and the lines that name what a step edits
reference   the edits in plain torch
triton      the same in kernels
"""
