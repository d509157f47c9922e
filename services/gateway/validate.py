"""From what a client asked for to what the engine gets: checks that need the model or another field.

Pure: the model is a handful of facts. Every refusal names the field as the client spelled it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.common.errors import InvalidArgument
from services.gateway.asked import Asked
from services.gateway.fields import Api
from services.gateway.kinds import wrong
from services.gateway.limits import DEFAULT_LIMITS, check_text
from services.gateway.request import ResponseOptions, SamplingParams, TextOptions

COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions where a client sets none: OpenAI's default."""


@dataclass(slots=True, frozen=True)
class ModelFacts:
    """What checks need to know of a model."""

    name: str
    vocab_size: int
    max_model_len: int  # longest prompt plus output: min(model length, KV capacity)
    max_n: int
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)


def read_prompts(value: object, *, field: str = "prompt") -> list[str | tuple[int, ...]]:
    """The prompts of a completion request: one text or id array, or an array of them."""
    if isinstance(value, str):
        return [_text_prompt(value, field, "")]
    if not isinstance(value, list) or not value:
        raise wrong(field, "a string, an array of token ids, or an array of these", value)
    if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return [tuple(value)]
    if len(value) > DEFAULT_LIMITS.prompts:
        raise wrong(field, f"an array of at most {DEFAULT_LIMITS.prompts} prompts", value)
    return [_one_prompt(item, field, i) for i, item in enumerate(value)]


def _one_prompt(item: object, field: str, index: int) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return _text_prompt(item, field, f"[{index}]")
    if not isinstance(item, list) or not item:
        raise wrong(field, "a string or an array of token ids", item, item=index)
    for token_id in item:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise wrong(field, "a token id", token_id, item=index)
    return tuple(item)


def _text_prompt(text: str, field: str, place: str) -> str:
    check_text(text, field + place)
    return text


def check_prompt(ids: Sequence[int], facts: ModelFacts, field: str) -> None:
    """Raises for a prompt that the model can't continue: empty, of unknown ids, or too long."""
    if not ids:
        raise InvalidArgument(f"{field}: empty; at least one token is needed", field=field)
    check_ids(ids, facts, field)
    if len(ids) >= facts.max_model_len:
        raise InvalidArgument(
            f"{field}: {len(ids)} tokens leave no room for an answer: prompt and answer together "
            f"are at most {facts.max_model_len} tokens",
            field=field,
            reason="CONTEXT_LENGTH_EXCEEDED",
        )


def check_ids(ids: Sequence[int], facts: ModelFacts, field: str) -> None:
    """Raises for an id that the model does not have."""
    if ids and (min(ids) < 0 or max(ids) >= facts.vocab_size):
        bad = next(token_id for token_id in ids if not 0 <= token_id < facts.vocab_size)
        shown = str(bad) if abs(bad) < 2**63 else "a huge number"
        raise InvalidArgument(f"{field}: token id {shown} is not in [0, {facts.vocab_size})", field=field)


def sampling_params(
    asked: Asked,
    facts: ModelFacts,
    *,
    prompt_tokens: int,
    api: Api,
    prefix: str = "",
    banned_sequences: Sequence[Sequence[int]] = (),
) -> SamplingParams:
    """Everything filled in: what was asked, then the model's own default, then ours."""
    for name, ids in (
        ("stop_token_ids", asked.stop_token_ids),
        ("allowed_token_ids", asked.allowed_token_ids),
        ("logit_bias", [token_id for token_id, _ in asked.logit_bias or ()]),
    ):
        check_ids(ids or (), facts, prefix + name)
    max_tokens, min_tokens = _lengths(asked, facts, prompt_tokens, api, prefix)
    logprobs, prompt_logprobs = _logprobs(asked, api, prefix)
    n = 1 if asked.n is None else asked.n
    if n > facts.max_n:
        raise InvalidArgument(f"{prefix}n: must be an integer from 1 to {facts.max_n}, not {n}", field=f"{prefix}n")
    return SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if asked.seed is None else asked.seed % 2**64,
        n=n,
        min_tokens=min_tokens,
        eos_token_ids=() if asked.ignore_eos else facts.eos_token_ids,
        stop_token_ids=tuple(dict.fromkeys(asked.stop_token_ids or ())),
        temperature=_number(asked.temperature, facts, "temperature", 1.0),
        top_p=_number(asked.top_p, facts, "top_p", 1.0),
        top_k=max(0, int(_number(asked.top_k, facts, "top_k", 0))),
        min_p=_number(asked.min_p, facts, "min_p", 0.0),
        repetition_penalty=_number(asked.repetition_penalty, facts, "repetition_penalty", 1.0),
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        logit_bias=asked.logit_bias or (),
        allowed_token_ids=tuple(dict.fromkeys(asked.allowed_token_ids or ())),
        banned_sequences=tuple(tuple(ids) for ids in banned_sequences),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        num_speculative_tokens=asked.num_speculative_tokens,
    )


def _number(value: float | None, facts: ModelFacts, name: str, default: float) -> float:
    return facts.sampling_defaults.get(name, default) if value is None else value


def _lengths(asked: Asked, facts: ModelFacts, prompt_tokens: int, api: Api, prefix: str) -> tuple[int, int]:
    """max_tokens and min_tokens. A bound beyond the context is met at its end, so it is no error."""
    room = facts.max_model_len - prompt_tokens
    min_tokens = asked.min_tokens or 0
    if asked.max_tokens is not None:
        if min_tokens > asked.max_tokens:
            raise InvalidArgument(
                f"{prefix}min_tokens: {min_tokens} is more than max_tokens, {asked.max_tokens}",
                field=f"{prefix}min_tokens",
            )
        max_tokens = asked.max_tokens
    else:
        default = COMPLETION_TOKENS if api is Api.COMPLETIONS else int(facts.sampling_defaults.get("max_tokens", room))
        max_tokens = max(default, min_tokens)
    max_tokens = min(max_tokens, room)
    return max_tokens, min(min_tokens, max_tokens)


def _logprobs(asked: Asked, api: Api, prefix: str) -> tuple[int | None, int | None]:
    """Likeliest tokens wanted per output position, and per prompt position."""
    logprobs = asked.logprobs
    if api is Api.CHAT:
        if asked.top_logprobs and not asked.show_logprobs:
            raise InvalidArgument(f"{prefix}top_logprobs: needs logprobs to be true", field=f"{prefix}top_logprobs")
        logprobs = (asked.top_logprobs or 0) if asked.show_logprobs else None
    prompt_logprobs = asked.prompt_logprobs
    if asked.echo and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    return logprobs, prompt_logprobs


def text_options(asked: Asked) -> TextOptions:
    """How ids become text."""
    return TextOptions(
        stop=tuple(dict.fromkeys(asked.stop or ())),
        include_stop=bool(asked.include_stop),
        skip_special_tokens=asked.skip_special_tokens is not False,
    )


def response_options(asked: Asked, sampling: SamplingParams, *, prefix: str = "") -> ResponseOptions:
    """How the answer is shown."""
    options = asked.stream_options
    if options is not None and not asked.stream:
        raise InvalidArgument(f"{prefix}stream_options: needs stream to be true", field=f"{prefix}stream_options")
    return ResponseOptions(
        stream=bool(asked.stream),
        include_usage=bool(options and options.get("include_usage")),
        continuous_usage=bool(options and options.get("continuous_usage_stats")),
        top_logprobs=sampling.logprobs,
        echo=bool(asked.echo),
        return_token_ids=bool(asked.return_token_ids),
    )
