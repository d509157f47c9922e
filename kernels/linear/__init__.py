"""Matrix product with a weight: reference, packed (oneDNN), tiled (bit-equal rows), triton (quantized, see quantized).

A weight is prepared once, when it is loaded, and then called: an implementation may keep it in a layout of its own.
"""
