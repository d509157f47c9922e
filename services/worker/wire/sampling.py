"""How the tokens of a row are chosen, from the contract's message."""

from __future__ import annotations

from collections.abc import Iterable

from protos import common_pb2
from services.common.errors import InvalidArgument
from services.worker.step import SamplingParams

MAX_LOGPROBS = 20


def decode_sampling(params: common_pb2.SamplingParams, seed: int, vocab_size: int) -> SamplingParams:
    """The parameters with their defaults. Raises InvalidArgument naming the field.

    A constraint is the engine's to enforce: it flags the steps that have to wait for its masks.
    """

    def ids(values: Iterable[int], name: str) -> tuple[int, ...]:
        result = tuple(values)
        if any(value >= vocab_size for value in result):
            raise InvalidArgument(f"sampling.{name} has an id outside [0, {vocab_size})", field=name)
        return result

    def number(name: str, low: float, high: float, default: float) -> float:
        value = float(getattr(params, name)) if params.HasField(name) else default
        if not low <= value <= high:  # NaN compares false
            raise InvalidArgument(f"sampling.{name} is {value}, not within [{low}, {high}]", field=name)
        return value

    bias = tuple((item.token_id, item.bias) for item in params.logit_bias)
    ids((token for token, _ in bias), "logit_bias")
    if not all(-100 <= value <= 100 for _, value in bias):
        raise InvalidArgument("sampling.logit_bias is not within [-100, 100]", field="logit_bias")
    top = {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}
    for name, value in top.items():
        if value > MAX_LOGPROBS:
            raise InvalidArgument(f"sampling.{name} is {value}, above {MAX_LOGPROBS}", field=name)
    return SamplingParams(
        seed=seed,
        min_tokens=params.min_tokens,
        eos_ids=ids(params.eos_token_ids, "eos_token_ids"),
        stop_ids=ids(params.stop_token_ids, "stop_token_ids"),
        temperature=number("temperature", 0, 1e6, 1.0),
        top_p=number("top_p", 2.0**-149, 1, 1.0),
        top_k=params.top_k,
        min_p=number("min_p", 0, 1, 0.0),
        repetition_penalty=number("repetition_penalty", 9e-7, 1e6, 1.0),
        frequency_penalty=number("frequency_penalty", -2, 2, 0.0),
        presence_penalty=number("presence_penalty", -2, 2, 0.0),
        logit_bias=bias,
        allowed_ids=ids(params.allowed_token_ids, "allowed_token_ids"),
        banned_sequences=tuple(ids(item.ids, "banned_sequences") for item in params.banned_sequences if item.ids),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
    )
