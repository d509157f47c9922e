"""The whole sampler once more, slow and plain, written from its documented order. The oracle of the tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.worker.sampling.counter import draw, key
from services.worker.step import SamplingParams


def edited(logits: Sequence[float], params: SamplingParams, tokens: Sequence[int], prompt_len: int) -> list[float]:
    """Masks, bias and penalties."""
    x = list(logits)
    outputs = list(tokens[prompt_len:])
    for token in range(len(x)):
        if params.allowed_ids and token not in params.allowed_ids:
            x[token] = -math.inf
        for *before, last in params.banned_sequences:
            if token == last and list(tokens[len(tokens) - len(before) :]) == before:
                x[token] = -math.inf
        if len(outputs) < params.min_tokens and token in (*params.eos_ids, *params.stop_ids):
            x[token] = -math.inf
        x[token] += dict(params.logit_bias).get(token, 0.0)
        if token in tokens:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        if token in outputs:
            x[token] -= params.frequency_penalty * outputs.count(token) + params.presence_penalty
    return x


def reference(logits: Sequence[float], params: SamplingParams, tokens: Sequence[int], prompt_len: int) -> int | None:
    """The token, or None where nothing may be sampled."""
    x = edited(logits, params, tokens, prompt_len)
    best = max(x)
    if best == -math.inf:
        return None
    if params.temperature <= 1e-4:
        return x.index(best)
    scaled = [(value - best) / params.temperature for value in x]
    survivors = sorted(range(len(x)), key=lambda token: (-scaled[token], token))
    if params.min_p > 0:
        survivors = [token for token in survivors if scaled[token] >= math.log(params.min_p)]
    if params.top_k > 0:
        survivors = survivors[: params.top_k]
    if params.top_p < 1:
        mass = sum(math.exp(scaled[token]) for token in survivors)
        before, head = 0.0, []
        for token in survivors:
            if before >= params.top_p * mass and head:
                break
            head.append(token)
            before += math.exp(scaled[token])
        survivors = head
    position_key = key(params.seed, len(tokens))

    def total(token: int) -> float:
        uniform = ((draw(position_key, token) >> 11) + 0.5) * 2.0**-53
        return scaled[token] - math.log(-math.log1p(-uniform))

    return max(survivors, key=lambda token: (total(token), -token))
