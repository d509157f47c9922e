"""The one table of request fields, for JSON and gRPC alike: who takes a field, what it may be, what it means.

    body ──read_fields──▶ Asked ──validate──▶ SamplingParams, TextOptions, ResponseOptions

A field that is not in the table is refused with the nearest one that is; one whose feature is not
built is refused by its name. Null is the same as unset.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidArgument, Unimplemented
from services.common.settings import nearest
from services.gateway.kinds import Anything, Bias, Bool, Flags, Ids, Int, Json, Kind, Number, Object, OneOf, Text, Texts
from services.gateway.limits import DEFAULT_LIMITS as LIMITS


class Api(enum.Flag):
    """The calls that take fields."""

    CHAT = enum.auto()
    COMPLETIONS = enum.auto()
    GRPC = enum.auto()
    TOKENIZE = enum.auto()
    DETOKENIZE = enum.auto()
    OPENAI = CHAT | COMPLETIONS
    GENERATE = CHAT | COMPLETIONS | GRPC
    RENDER = CHAT | GRPC | TOKENIZE
    ANY = GENERATE | TOKENIZE | DETOKENIZE


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
    n: int | None = None
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
    # how it is treated
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None


@dataclass(slots=True, frozen=True)
class Field:
    """A row: `to` names the attribute of Asked; None means that the field is taken and changes nothing."""

    name: str
    kind: Kind
    apis: Api
    meaning: str
    to: str | None


def _same(name: str, kind: Kind, apis: Api, meaning: str) -> Field:
    return Field(name, kind, apis, meaning, name)


_TOP = Int(0, LIMITS.top_logprobs)
_PENALTY = Number(-2.0, 2.0)

FIELDS: tuple[Field, ...] = (
    _same("model", Text(empty=False), Api.ANY, "Name of the model; unset means the only one there is."),
    _same("messages", Anything(), Api.CHAT | Api.TOKENIZE, "The conversation, oldest turn first."),
    _same("prompt", Anything(), Api.COMPLETIONS | Api.TOKENIZE, "Text, token ids, or an array of either."),
    _same("tokens", Ids(1 << 24), Api.DETOKENIZE, "Token ids."),
    _same(
        "add_special_tokens",
        Bool(),
        Api.OPENAI | Api.TOKENIZE,
        "Adds the model's special tokens to text; by default to prompts, not to conversations.",
    ),
    _same("add_generation_prompt", Bool(), Api.RENDER, "Opens an answer after the last message; true by default."),
    _same("continue_final_message", Bool(), Api.RENDER, "Goes on inside the last message."),
    _same("chat_template_kwargs", Object(), Api.RENDER, "Further variables of the chat template."),
    _same("documents", Anything(), Api.CHAT, "Documents for the chat template: an array of objects."),
    _same("temperature", Number(0.0, 100.0), Api.GENERATE, "Softmax temperature; 0 is greedy; 1 by default."),
    _same("top_p", Number(0.0, 1.0, above_low=True), Api.GENERATE, "Smallest set of tokens with this probability."),
    _same("top_k", Int(-1), Api.GENERATE, "This many likeliest tokens; 0 or -1 means all."),
    _same("min_p", Number(0.0, 1.0), Api.GENERATE, "Drops tokens below this fraction of the likeliest one."),
    _same(
        "repetition_penalty",
        Number(1e-6, 2.0),  # below, logits run out of float32
        Api.GENERATE,
        "Scales the logits of tokens that stand in prompt or output; 1 changes nothing.",
    ),
    _same("frequency_penalty", _PENALTY, Api.GENERATE, "Subtracted per occurrence in the output."),
    _same("presence_penalty", _PENALTY, Api.GENERATE, "Subtracted where a token stands in the output."),
    _same("logit_bias", Bias(LIMITS.token_ids), Api.GENERATE, "Added to the logits of single tokens."),
    _same("allowed_token_ids", Ids(LIMITS.token_ids), Api.GENERATE, "Only these ids; empty means all."),
    _same("bad_words", Texts(LIMITS.bad_words, LIMITS.stop_bytes), Api.GENERATE, "Words that may not appear."),
    _same("seed", Int(-(2**63), 2**64 - 1), Api.GENERATE, "Makes sampling repeatable; drawn when unset."),
    _same("n", Int(1, 1 << 16), Api.GENERATE, "Choices; 1 by default."),
    _same(
        "num_speculative_tokens",
        Int(0, LIMITS.drafts),
        Api.GENERATE,
        "Most draft tokens per step; 0 turns drafts off; changes no token.",
    ),
    _same("max_tokens", Int(1), Api.GENERATE, "Most tokens of a choice; by default what the context leaves, or 16."),
    Field("max_completion_tokens", Int(1), Api.CHAT, "The newer name of max_tokens.", "max_tokens"),
    _same("min_tokens", Int(0), Api.GENERATE, "No end before this many tokens; wins over stop ids and stop strings."),
    _same("stop", Texts(LIMITS.stops, LIMITS.stop_bytes, single=True), Api.GENERATE, "Strings that end the text."),
    _same("stop_token_ids", Ids(LIMITS.token_ids), Api.GENERATE, "Ids that end the text."),
    Field("include_stop_str_in_output", Bool(), Api.GENERATE, "Keeps the stop in the text.", "include_stop"),
    _same("ignore_eos", Bool(), Api.GENERATE, "Goes on after the model's end-of-sequence id."),
    _same("stream", Bool(), Api.GENERATE, "Answers in deltas."),
    _same(
        "stream_options",
        Flags(("include_usage", "continuous_usage_stats")),
        Api.OPENAI,
        "Token counts at the end of a stream, or on each delta.",
    ),
    _same("skip_special_tokens", Bool(), Api.GENERATE, "Leaves special tokens out of the text; true by default."),
    Field("logprobs", Bool(), Api.CHAT, "Log probabilities of the tokens.", "show_logprobs"),
    _same("top_logprobs", _TOP, Api.CHAT, "Likeliest tokens per position; needs logprobs."),
    _same("logprobs", _TOP, Api.COMPLETIONS | Api.GRPC, "Log probabilities, with this many likeliest tokens."),
    _same("prompt_logprobs", _TOP, Api.GENERATE, "The same for the prompt."),
    _same("echo", Bool(), Api.COMPLETIONS | Api.GRPC, "The prompt's text before the output's."),
    _same("return_token_ids", Bool(), Api.GENERATE, "Token ids beside the text."),
    _same("return_token_strs", Bool(), Api.TOKENIZE, "The vocabulary's spelling of each id."),
    _same("priority", Int(-(2**31)), Api.GENERATE, "Lower is more urgent; 0 by default."),
    _same("cache_salt", Text(longest=1024, empty=False), Api.GENERATE, "Only equal salts share cached prefixes."),
    _same("request_id", Text(longest=256, empty=False), Api.GENERATE, "The client's own id, echoed and logged."),
    # Taken because clients send them, and without effect on the answer.
    Field("user", Text(), Api.OPENAI, "Who the client's user is; changes nothing.", None),
    Field("safety_identifier", Text(), Api.CHAT, "Who the client's user is; changes nothing.", None),
    Field("prompt_cache_key", Text(), Api.CHAT, "A hint for caches; every prefix is cached here anyway.", None),
    Field("metadata", Object(), Api.CHAT, "Labels for stored answers; nothing is stored here.", None),
    Field("store", OneOf((False,)), Api.CHAT, "Nothing is stored here.", None),
    Field("service_tier", OneOf(("auto", "default")), Api.CHAT, "There is one tier.", None),
    Field("parallel_tool_calls", Bool(), Api.OPENAI, "Without tools there are no calls.", None),
    Field("modalities", OneOf((["text"],)), Api.CHAT, "Answers are text.", None),
    Field("spaces_between_special_tokens", OneOf((True,)), Api.OPENAI, "Text is joined as the tokenizer does.", None),
)


@dataclass(slots=True, frozen=True)
class Refused:
    """A known field whose feature is not built; its neutral values ask for nothing and pass."""

    name: str
    apis: Api
    neutral: tuple[Json, ...] = ()


REFUSED: tuple[Refused, ...] = (
    Refused("tools", Api.CHAT | Api.GRPC | Api.TOKENIZE, ([],)),
    Refused("tool_choice", Api.CHAT | Api.GRPC, ("none", "auto")),
    Refused("functions", Api.CHAT, ([],)),
    Refused("function_call", Api.CHAT, ("none", "auto")),
    Refused("response_format", Api.OPENAI, ({"type": "text"},)),
    Refused("structured_outputs", Api.OPENAI),
    Refused("constraint", Api.GRPC),
    Refused("guided_json", Api.OPENAI),
    Refused("guided_regex", Api.OPENAI),
    Refused("guided_choice", Api.OPENAI),
    Refused("guided_grammar", Api.OPENAI),
    Refused("reasoning_effort", Api.CHAT, ("none",)),
    Refused("include_reasoning", Api.CHAT),
    Refused("thinking_token_budget", Api.CHAT),
    Refused("verbosity", Api.CHAT, ("medium",)),
    Refused("audio", Api.CHAT),
    Refused("prediction", Api.CHAT),
    Refused("web_search_options", Api.CHAT),
    Refused("prompt_cache_retention", Api.CHAT),
    Refused("suffix", Api.COMPLETIONS, ("",)),
    Refused("best_of", Api.COMPLETIONS, (1,)),
    Refused("use_beam_search", Api.OPENAI, (False,)),
    Refused("length_penalty", Api.OPENAI, (1, 1.0)),
    Refused("prompt_embeds", Api.COMPLETIONS),
    Refused("chat_template", Api.CHAT | Api.TOKENIZE),
    Refused("echo", Api.CHAT, (False,)),
    Refused("truncate_prompt_tokens", Api.OPENAI),
    Refused("truncation_side", Api.OPENAI),
    Refused("media_io_kwargs", Api.CHAT),
    Refused("mm_processor_kwargs", Api.OPENAI),
    Refused("return_tokens_as_token_ids", Api.OPENAI, (False,)),
    Refused("return_token_offsets", Api.OPENAI, (False,)),
    Refused("kv_transfer_params", Api.OPENAI),
    Refused("vllm_xargs", Api.OPENAI),
    Refused("repetition_detection", Api.OPENAI),
    Refused("stream_interval", Api.OPENAI, (1,)),
    Refused("logprob_token_ids", Api.OPENAI),
    Refused("session_id", Api.OPENAI),
)


def _rows(api: Api) -> dict[str, Field | Refused]:
    rows: dict[str, Field | Refused] = {row.name: row for row in REFUSED if api in row.apis}
    return rows | {row.name: row for row in FIELDS if api in row.apis}


_ROWS: Mapping[Api, Mapping[str, Field | Refused]] = {
    api: _rows(api) for api in (Api.CHAT, Api.COMPLETIONS, Api.GRPC, Api.TOKENIZE, Api.DETOKENIZE)
}


_GRPC_NAMES: Mapping[str, str] = {
    **{name: f"options.{name}" for name in ("stream", "return_token_ids", "priority", "cache_salt", "request_id")},
    **{name: name for name in ("echo", "add_generation_prompt", "continue_final_message", "tool_choice")},
    **{name: f"{name}_json" for name in ("chat_template_kwargs", "tools")},
}
"""How the gRPC messages spell fields that are not sampling options."""


def accepted(api: Api) -> dict[str, Field]:
    """The rows that a call accepts, by name."""
    return {name: row for name, row in _ROWS[api].items() if isinstance(row, Field)}


def read_fields(values: Mapping[str, object], api: Api, *, prefix: str = "") -> Asked:
    """Checks each value of a request by itself. `prefix` is how the caller spells the names ("sampling.")."""
    rows = _ROWS[api]
    asked: dict[str, Any] = {}
    for name, value in values.items():
        row = rows.get(name)
        field = _GRPC_NAMES.get(name, prefix + name) if prefix else name
        if row is None:
            known = [known for known, row in rows.items() if isinstance(row, Field)]
            raise InvalidArgument(f"{field}: unknown field{nearest(name, known)}", field=field)
        if value is None:
            continue
        if isinstance(row, Refused):
            _refuse(row, value, field, api)
            continue
        read = row.kind.read(value, field)
        if row.to is None:
            continue
        if asked.setdefault(row.to, read) != read:
            raise InvalidArgument(f"{field}: contradicts another field that means the same", field=field)
    return Asked(**asked)


def _refuse(row: Refused, value: object, field: str, api: Api) -> None:
    if any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in row.neutral):
        return
    message = f"{field}: not supported by this server"
    if row.neutral:
        message += f" except as {' or '.join(map(_json, row.neutral))}"
    error = Unimplemented if api is Api.GRPC else InvalidArgument
    raise error(message, field=field)


def _json(value: Json) -> str:
    return OneOf((value,)).wanted
