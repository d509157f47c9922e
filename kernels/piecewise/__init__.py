"""A forward pass as pieces that a compiler fuses, with attention between them.

    mathematics ─record▶ program ─passes▶ program ─split▶ pieces ─▶ trace ─▶ compile ─▶ kept on disk
                          (at every start, milliseconds)           (once: seconds)

encoder    an encoder of media as pieces
ops        the table of ops over symbols: a model's mathematics, recorded when it is loaded
compiler   compiled pieces: found in this process, on disk, or made
cache      what is kept on disk, and what it depends on
lowering   a piece into code: traced by the references of its ops, compiled by Inductor
running    pieces on tensors in turn, attention and media between them
passes     what is changed in a program before it is split
pieces     where a program is split, and which of its pieces are the same
opaque     a product that a compiler does not look into
program    recording: symbols, nodes, weights as arguments
"""
