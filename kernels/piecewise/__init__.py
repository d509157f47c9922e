"""A forward pass as pieces that a compiler fuses, with attention between them.

ops        the table of ops over symbols: a model's mathematics, recorded when it is loaded
running    a recorded program on tensors: its pieces in turn, attention and media between
pieces     where a program is split, and which of its pieces are the same
program    recording: symbols, nodes, weights as arguments
"""
