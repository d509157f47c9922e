"""Graphs of a forward pass: what the GPU does for it, recorded before serving and started by one call.

    tokens of a step ─▶ dispatch ─▶ FULL       one graph of the whole pass: at most so many tokens in each row
                                    PIECEWISE  a graph of each compiled piece, and attention between them
                                    NONE       the pass as it is

A graph reads and writes the memory that it was recorded with. So a step's inputs are copied to it, padded to the
graph's size: a padding token is written nowhere, a padding row has a context of 0.

graphed    a pass with its graphs, and what the graphs of a model share
pieces     graphs of pieces
inputs     the memory that graphs read
triton     the copy of a step's inputs, padded
reference  its specification
dispatch   which graph a batch takes
capture    how graphs are recorded, on a GPU and where there is none
"""
