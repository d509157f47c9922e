"""The kernels of the CPU in C++: a whole forward pass is one call.

ops        the table of ops over symbols: the mathematics of a model, recorded when it is loaded
program    recording: symbols, instructions, the buffers they share; a listing to read
library    the interface to C: structures, functions, memory
build      finds a compiler, builds for this machine once, keeps the result
src        the C++ sources
"""
