"""Tests of what is built over Triton kernels, in the interpreter: tests/kernels/test_triton.py starts them."""
