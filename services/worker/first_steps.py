"""Steps that nobody asked for, run before serving: what compiles a kernel when it first runs compiles it here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from services.common.logs import Log
from services.worker.device_steps import DeviceSteps
from services.worker.step import (
    MASKED,
    SAMPLES,
    CacheShape,
    Int32,
    NewRow,
    SamplingParams,
    StepInput,
    StepOutput,
    made_step,
)

_log = Log("worker.first_steps")
_GREEDY = SamplingParams(seed=0, temperature=0.0)
_EDITED = SamplingParams(
    seed=0,
    temperature=1.0,
    top_p=0.9,
    top_k=5,
    min_p=0.01,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    min_tokens=8,
    eos_ids=(0,),
    logit_bias=((1, 1.0),),
    allowed_ids=(0, 1, 2),
    banned_sequences=((1, 2),),
    logprobs=1,
)
_KINDS = (_GREEDY, replace(_GREEDY, temperature=1.0), replace(_GREEDY, temperature=1.0, top_p=0.5), _EDITED)
_PROMPT = 2
_LENGTH = 8
"""Ids that a row has at most here."""


def run_first_steps(steps: DeviceSteps, shape: CacheShape, vocab_size: int) -> None:
    """Runs them on the first row and the first block, which are free again afterwards.

    A cache too small for them is left alone.
    """
    if min(shape.max_model_len, shape.max_num_batched_tokens) < _LENGTH or vocab_size < _LENGTH:
        return
    begun = time.monotonic()
    mask_MB = np.full((2, -(-vocab_size // 32) * 4), 255, np.uint8)
    for step in _steps(shape):
        output = steps.execute(step, lambda: {0: mask_MB})
        if not isinstance(output, StepOutput):
            output.wait()
    steps.clear()
    _log.info("first steps", seconds=round(time.monotonic() - begun, 3))


def _steps(shape: CacheShape) -> Iterator[StepInput]:
    """Of each kind of request a prompt, a token, a token with a mask, and one with a draft."""
    blocks = -(-_LENGTH // shape.block_size)
    for params in _KINDS:
        new = NewRow(0, 0, np.zeros(_PROMPT, np.int32), _PROMPT, params, "first steps", None)
        yield made_step((new,), _one(_PROMPT), _one(0), blocks=blocks)
        yield made_step((), _one(1), _one(_PROMPT))
        yield made_step((), _one(1), _one(_PROMPT + 1), flags=SAMPLES | MASKED)
        yield made_step((), _one(2), _one(_PROMPT + 2), drafts=1)


def _one(value: int) -> Int32:
    return np.array([value], np.int32)
