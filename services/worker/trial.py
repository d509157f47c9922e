"""The largest step that an engine may send, run for the memory that it takes, with the tables of its rows.

All rows see the whole context, one of them computes everything that the budget leaves, and as many positions
are sampled as exist at once, with every cutoff and log probabilities: with drafts a row samples several. The
rows share one KV block, so that no cache is needed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from services.worker.cache import KVCache
from services.worker.device_steps import DeviceSteps
from services.worker.models.decoder import Decoder
from services.worker.multimodal import Multimodal
from services.worker.pooling import Pooler
from services.worker.sampling.feature import Position
from services.worker.sampling.sampler import Sampler
from services.worker.states import Span, States
from services.worker.step import (
    MASKED,
    SAMPLES,
    CacheShape,
    Masks,
    NewRow,
    SamplingParams,
    StepInput,
    StepOutput,
    made_step,
)

_PARAMS = SamplingParams(seed=0, temperature=1.0, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=20)
_GREEDY = SamplingParams(seed=0, temperature=0.0)

_FLAT = 16
"""Rows, of those that are sampled, in which every token is as likely as the others."""


@torch.inference_mode()
def trial_step(model: Decoder, shape: CacheShape, logits_rows: int) -> None:
    """Runs it. At most `logits_rows` positions have logits at once."""
    shape = replace(shape, num_blocks=1)
    if model.ops.on_device is None:
        _on_host(model, shape, logits_rows)
    else:
        _on_device(model, shape, logits_rows)


def _on_device(model: Decoder, shape: CacheShape, logits_rows: int) -> None:
    """Once as above, and once with nothing but the largest logits of as many positions."""
    cache = KVCache(model.kv_layout, shape, model.device)
    steps = DeviceSteps(model, cache, shape, (Pooler(), Multimodal(None, None)), logits_rows)
    rows = min(shape.max_num_seqs, shape.max_num_batched_tokens)
    longest = min(shape.max_num_batched_tokens - rows + 1, shape.max_model_len)
    drafts = max(0, min(logits_rows - rows, longest - 1))
    mask_MB = np.full((drafts + 1, -(-model.config.vocab_size // 32) * 4), 255, np.uint8)
    masks: Masks = dict.fromkeys(range(rows), mask_MB)
    some = min(rows, logits_rows)
    for step in (
        _step(shape, [1] * (rows - 1) + [longest], drafts, _PARAMS, SAMPLES | MASKED),
        _step(shape, [1] * some, 0, _GREEDY, SAMPLES),
    ):
        output = steps.execute(step, lambda: masks)
        if not isinstance(output, StepOutput):
            output.wait()


def _step(shape: CacheShape, counts: list[int], drafts: int, params: SamplingParams, flags: int) -> StepInput:
    """So many tokens of each row, up to the context's end; the last ones of the last row are drafts."""
    rows, length = len(counts), shape.max_model_len
    blocks = -(-length // shape.block_size)
    ids, last = np.zeros(length, np.int32), [0] * (rows - 1) + [drafts]
    new = [NewRow(row, 0, ids[: length - last[row]], 1, params, "trial", None) for row in range(rows)]
    num_tokens = np.array(counts, np.int32)
    return made_step(tuple(new), num_tokens, length - num_tokens, flags=flags, drafts=drafts, blocks=blocks)


def _on_host(model: Decoder, shape: CacheShape, logits_rows: int) -> None:
    rows = min(shape.max_num_seqs, shape.max_num_batched_tokens)
    states = States(shape)
    sampler = Sampler(model.config.vocab_size, model.device, model.ops.selection)
    tokens = np.zeros(shape.max_model_len, np.int32)
    spans: list[Span] = []
    for row in range(rows):
        new = NewRow(row, row, tokens, shape.max_model_len, _PARAMS, "trial", None)
        states.add(new)
        sampler.add(new)
        longest = min(shape.max_num_batched_tokens - rows + 1, shape.max_model_len)
        computed = shape.max_model_len - (longest if row == rows - 1 else 1)
        spans.append(Span(row, computed, shape.max_model_len, SAMPLES, 0))
    total = sum(span.end - span.start for span in spans)
    batch = states.batch(spans, range(max(0, total - logits_rows), total))
    cache = KVCache(model.kv_layout, shape, model.device)
    hidden_TD = model.forward(batch, cache)
    hidden_SD = batch.sampled(hidden_TD)
    model.likeliest_of(hidden_SD)
    logits_NV = model.logits(hidden_SD)
    logits_NV[:_FLAT].zero_()  # the most that cutoffs can take, whatever the model says: all tokens are looked at
    sampler.sample(logits_NV, [Position(spans[index % rows].row, tokens) for index in range(len(logits_NV))])
    last = [Span(span.row, span.end - 1, span.end, SAMPLES, 0) for span in spans[:logits_rows]]
    model.likeliest(states.batch(last, range(len(last))), cache)
