"""From what a client asked for to what the engine gets: checks that need the model or another field.

Pure: the model is a handful of facts. Every refusal names the field as the client spelled it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.common.errors import InvalidArgument
from services.gateway.asked import Asked
from services.gateway.fields import Api, Caller
from services.gateway.kinds import Int, read_ids, whole, wrong
from services.gateway.limits import DEFAULT_LIMITS, check_text
from services.gateway.request import (
    Constraint,
    ReasoningOptions,
    ResponseOptions,
    SamplingParams,
    TextOptions,
    ToolOptions,
)

COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions where a client sets none: OpenAI's default."""
OUTPUT_LOGPROBS = "message.output_text.logprobs"
"""What `include` of /v1/responses may hold."""


@dataclass(slots=True, frozen=True)
class ModelFacts:
    """What checks need to know of a model."""

    name: str
    vocab_size: int
    max_model_len: int  # longest prompt plus output: min(model length, KV capacity)
    max_n: int
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)


def prompt_limit(asked: Asked, caller: Caller, facts: ModelFacts) -> int | None:
    """Most tokens that a prompt is cut to; None where it may not be cut.

    What fits (-1) leaves room for the answer that was asked for, but for one token at least.
    """
    limit = asked.truncate_prompt_tokens
    field = caller.spell("truncate_prompt_tokens")
    if limit is None:
        if asked.truncation_side is not None:
            side = caller.spell("truncation_side")
            raise InvalidArgument(f"{side}: needs {field}", field=side)
        return None
    if limit == 0:
        raise InvalidArgument(f"{field}: must be -1 or at least 1, so that something is left", field=field)
    if limit > 0:
        return limit
    if caller.api is Api.EMBEDDINGS:
        return facts.max_model_len
    answer = COMPLETION_TOKENS if caller.api is Api.COMPLETIONS else 1
    answer = max(answer if asked.max_tokens is None else asked.max_tokens, asked.min_tokens or 0)
    return max(1, facts.max_model_len - answer)


def read_prompts(
    value: object, *, field: str = "prompt", most: int = DEFAULT_LIMITS.prompts
) -> list[str | tuple[int, ...]]:
    """The prompts of a completion request: one text or id array, or an array of them."""
    if isinstance(value, str):
        return [_text_prompt(value, field)]
    if not isinstance(value, list) or not value:
        raise wrong(field, "a string, an array of token ids, or an array of these", value)
    if whole(value[0]) is not None:
        return [read_ids(value, field)]
    if len(value) > most:
        raise wrong(field, f"an array of at most {most} prompts", value)
    return [_one_prompt(item, f"{field}[{i}]") for i, item in enumerate(value)]


def _one_prompt(item: object, field: str) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return _text_prompt(item, field)
    if not isinstance(item, list) or not item:
        raise wrong(field, "a string or an array of token ids", item)
    return read_ids(item, field)


def _text_prompt(text: str, field: str) -> str:
    check_text(text, field)
    return text


def prompt_field(value: object, index: int, *, field: str = "prompt") -> str:
    """How a client spells the place of one of its prompts."""
    alone = not isinstance(value, list) or whole(value[0]) is not None
    return field if alone else f"{field}[{index}]"


def check_prompt(ids: Sequence[int], facts: ModelFacts, field: str, *, answer: int = 1) -> None:
    """Raises for a prompt that the model can't take: empty, of unknown ids, or too long for `answer` more tokens."""
    if not ids:
        raise InvalidArgument(f"{field}: empty; at least one token is needed", field=field)
    check_ids(ids, facts, field)
    if len(ids) + answer > facts.max_model_len:
        words = "leave no room for an answer: prompt and answer together are at most" if answer else "are more than"
        raise InvalidArgument(
            f"{field}: {len(ids)} tokens {words} {facts.max_model_len} tokens",
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
    caller: Caller,
    *,
    prompt_tokens: int,
    banned_sequences: Sequence[Sequence[int]] = (),
    constraint: Constraint | None = None,
    echoes_prompt: bool = False,
) -> SamplingParams:
    """Everything filled in: what was asked, then the model's own default, then ours.

    `echoes_prompt` says whether the answer begins with the whole prompt, so with its log probabilities.
    """
    for name, ids in (
        ("stop_token_ids", asked.stop_token_ids),
        ("allowed_token_ids", asked.allowed_token_ids),
        ("logit_bias", [token_id for token_id, _ in asked.logit_bias or ()]),
    ):
        check_ids(ids or (), facts, caller.spell(name))
    max_tokens, min_tokens = _lengths(asked, facts, prompt_tokens, caller)
    logprobs, prompt_logprobs = _logprobs(asked, caller, echoes_prompt)
    n = 1 if asked.n is None else Int(1, facts.max_n).read(asked.n, caller.spell("n"))
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
        constraint=constraint,
    )


def _number(value: float | None, facts: ModelFacts, name: str, default: float) -> float:
    return facts.sampling_defaults.get(name, default) if value is None else value


def _lengths(asked: Asked, facts: ModelFacts, prompt_tokens: int, caller: Caller) -> tuple[int, int]:
    """max_tokens and min_tokens. A bound beyond the context is met at its end, so it is no error."""
    room = facts.max_model_len - prompt_tokens
    min_tokens = asked.min_tokens or 0
    if asked.max_tokens is not None:
        if min_tokens > asked.max_tokens:
            field = caller.spell("min_tokens")
            raise InvalidArgument(f"{field}: {min_tokens} is more than max_tokens, {asked.max_tokens}", field=field)
        max_tokens = asked.max_tokens
    else:
        default = (
            COMPLETION_TOKENS if caller.api is Api.COMPLETIONS else int(facts.sampling_defaults.get("max_tokens", room))
        )
        max_tokens = max(default, min_tokens)
    max_tokens = min(max_tokens, room)
    return max_tokens, min(min_tokens, max_tokens)


def _logprobs(asked: Asked, caller: Caller, echoes_prompt: bool) -> tuple[int | None, int | None]:
    """Likeliest tokens wanted per output position, and per prompt position."""
    logprobs = asked.logprobs
    if caller.api in Api.CHAT | Api.RESPONSES:
        if caller.api is Api.CHAT:
            shown, needed = bool(asked.show_logprobs), "logprobs to be true"
        else:
            for i, part in enumerate(asked.include or ()):
                if part != OUTPUT_LOGPROBS:
                    raise wrong("include", f'"{OUTPUT_LOGPROBS}"', part, item=i)
            shown, needed = bool(asked.include), f'"{OUTPUT_LOGPROBS}" in include'
        if asked.top_logprobs and not shown:
            raise InvalidArgument(f"top_logprobs: needs {needed}", field="top_logprobs")
        logprobs = (asked.top_logprobs or 0) if shown else None
    prompt_logprobs = asked.prompt_logprobs
    if echoes_prompt and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    return logprobs, prompt_logprobs


def text_options(
    asked: Asked,
    *,
    kept_ids: tuple[int, ...] = (),
    reasoning: ReasoningOptions | None = None,
    tools: ToolOptions | None = None,
) -> TextOptions:
    """How ids become text, and text an answer."""
    return TextOptions(
        stop=tuple(dict.fromkeys(asked.stop or ())),
        include_stop=bool(asked.include_stop),
        skip_special_tokens=asked.skip_special_tokens is not False,
        kept_ids=kept_ids,
        reasoning=reasoning,
        tools=tools,
    )


def response_options(asked: Asked, sampling: SamplingParams, caller: Caller) -> ResponseOptions:
    """How the answer is shown."""
    options = asked.stream_options
    for name, value in (("stream_options", options), ("stream_interval", asked.stream_interval)):
        if value is not None and not asked.stream:
            field = caller.spell(name)
            raise InvalidArgument(f"{field}: needs stream to be true", field=field)
    if asked.return_tokens_as_token_ids and sampling.logprobs is None:
        field = caller.spell("return_tokens_as_token_ids")
        raise InvalidArgument(f"{field}: needs logprobs", field=field)
    return ResponseOptions(
        stream=bool(asked.stream),
        include_usage=bool(options and options.get("include_usage")),
        continuous_usage=bool(options and options.get("continuous_usage_stats")),
        top_logprobs=sampling.logprobs,
        echo=bool(asked.echo),
        return_token_ids=bool(asked.return_token_ids),
        tokens_as_ids=bool(asked.return_tokens_as_token_ids),
        stream_interval=asked.stream_interval or 1,
    )


def forbidding(asked: Asked, caller: Caller, constraint: Constraint | None) -> str | None:
    """The field to name where no token is left to sample: the one that leaves fewest; None if none takes any."""
    for name, value in (("allowed_token_ids", asked.allowed_token_ids), ("bad_words", asked.bad_words)):
        if value:
            return caller.spell(name)
    if constraint is not None:
        return constraint.place or None
    return caller.spell("min_tokens") if asked.min_tokens else None


def labels(asked: Asked) -> dict[str, str]:
    """The client's own words about the request, for the log."""
    said = {
        "user": asked.user,
        "safety_identifier": asked.safety_identifier,
        "prompt_cache_key": asked.prompt_cache_key,
        **{f"metadata.{name}": value for name, value in (asked.metadata or {}).items()},
    }
    return {name: value for name, value in said.items() if value is not None}
