"""Tests of Triton kernels that run in the interpreter: tests/kernels/test_triton.py starts them, in one process."""
