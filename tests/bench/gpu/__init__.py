"""Kernels and whole steps on the GPU of this machine: python -m tests.bench.gpu [--toy] [--out FILE].

Needs torch, triton, numpy and safetensors, and nothing of the wire: no stubs, no gRPC, no settings. Weights are random
and made on the device.

__main__    the order of what is measured, the table and the JSON
steps       whole steps of models of known shapes
models      those models, with random weights
rooms       every kernel: its inputs, its reference, its floor
choosing    the same of kernels that edit logits, choose tokens and keep the table of requests
replays     graphs, held to the pass without
case        one kernel with inputs: checked, then timed
clock       time on the device, and what it can do at most
"""
