"""What a client asked for, as plain values: the fields of every call under one name each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Asked:
    """What a client asked for, each value checked by itself; None where it said nothing."""

    # what to continue
    model: str | None = None
    messages: object = None
    prompt: object = None
    tokens: tuple[int, ...] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: object = None
    media_io_kwargs: object = None
    mm_processor_kwargs: object = None
    chat_template: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    input: object = None
    instructions: str | None = None
    # what the answer may be
    tools: object = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    response_format: object = None
    structured_outputs: object = None
    constraint: object = None
    reasoning_effort: str | None = None
    reasoning: object = None
    text: object = None
    pooling: str | None = None
    dimensions: int | None = None
    # how tokens are chosen
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    seed: int | None = None
    n: object = None
    num_speculative_tokens: int | None = None
    # when it ends
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    include_stop: bool | None = None
    ignore_eos: bool | None = None
    # how it is shown
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None
    skip_special_tokens: bool | None = None
    show_logprobs: bool | None = None
    top_logprobs: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_token_strs: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_interval: int | None = None
    include_reasoning: bool | None = None
    include: tuple[str, ...] | None = None
    encoding_format: str | None = None
    # how it is treated
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
