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
from services.gateway.asked import Asked
from services.gateway.kinds import (
    Anything,
    Bias,
    Bool,
    Flags,
    Ids,
    Int,
    Json,
    Kind,
    Labels,
    Number,
    Object,
    OneOf,
    Text,
    Texts,
)
from services.gateway.limits import DEFAULT_LIMITS as LIMITS


class Api(enum.Flag):
    """The calls that take fields."""

    CHAT = enum.auto()
    COMPLETIONS = enum.auto()
    GRPC = enum.auto()
    TOKENIZE = enum.auto()
    DETOKENIZE = enum.auto()
    RESPONSES = enum.auto()
    EMBEDDINGS = enum.auto()
    OPENAI = CHAT | COMPLETIONS
    GENERATE = CHAT | COMPLETIONS | GRPC
    RENDER = CHAT | GRPC | TOKENIZE
    TALK = CHAT | GRPC | RESPONSES
    ANY = GENERATE | TOKENIZE | DETOKENIZE | RESPONSES | EMBEDDINGS


@dataclass(slots=True, frozen=True)
class Field:
    """A row: `to` names the attribute of Asked."""

    name: str
    kind: Kind
    apis: Api
    meaning: str
    to: str


def _same(name: str, kind: Kind, apis: Api, meaning: str) -> Field:
    return Field(name, kind, apis, meaning, name)


_TOP = Int(0, LIMITS.top_logprobs)
_PENALTY = Number(-2.0, 2.0)
_PROMPT = "text, token ids, or an array of either"
_SAMPLED = Api.GENERATE | Api.RESPONSES
_TREATED = _SAMPLED | Api.EMBEDDINGS
_MEDIA = Api.RENDER | Api.RESPONSES
_LABELLED = Api.OPENAI | Api.RESPONSES | Api.EMBEDDINGS

FIELDS: tuple[Field, ...] = (
    # What to continue.
    _same("model", Text(empty=False), Api.ANY, "Name of the model; unset means the only one there is."),
    _same(
        "messages", Anything("an array of messages"), Api.CHAT | Api.TOKENIZE, "The conversation, oldest turn first."
    ),
    _same("prompt", Anything(_PROMPT), Api.COMPLETIONS | Api.TOKENIZE, "Text, token ids, or an array of either."),
    _same(
        "input", Anything(_PROMPT), Api.RESPONSES | Api.EMBEDDINGS, "Text, or items of a conversation; texts or ids."
    ),
    _same("instructions", Text(), Api.RESPONSES, "A system message before the conversation."),
    _same("tokens", Ids(1 << 24), Api.DETOKENIZE, "Token ids."),
    _same(
        "add_special_tokens",
        Bool(),
        Api.GENERATE | Api.TOKENIZE,
        "Adds the model's special tokens to text; by default to prompts, not to conversations.",
    ),
    _same("add_generation_prompt", Bool(), Api.RENDER, "Opens an answer after the last message; true by default."),
    _same("continue_final_message", Bool(), Api.RENDER, "Goes on inside the last message."),
    _same("chat_template_kwargs", Object(), Api.RENDER, "Further variables of the chat template."),
    _same(
        "chat_template",
        Text(empty=False),
        Api.RENDER,
        "A template instead of the model's own, if the server allows it.",
    ),
    _same("documents", Anything("an array of objects"), Api.RENDER, "Documents for the chat template."),
    _same("media_io_kwargs", Anything("an object"), _MEDIA, 'How videos are read: {"video": {"fps", "num_frames"}}.'),
    _same("mm_processor_kwargs", Anything("an object"), _MEDIA, "Pixels and frames that the media processor keeps."),
    _same(
        "truncate_prompt_tokens",
        Int(-1),
        Api.GENERATE | Api.EMBEDDINGS,
        "Cuts a longer prompt to this many tokens; -1 means to what the context allows.",
    ),
    _same(
        "truncation_side",
        OneOf(("left", "right")),
        Api.GENERATE | Api.EMBEDDINGS,
        "Where a prompt is cut: left drops its beginning, as by default.",
    ),
    # How tokens are chosen.
    _same("temperature", Number(0.0, 100.0), _SAMPLED, "Softmax temperature; 0 is greedy; 1 by default."),
    _same("top_p", Number(0.0, 1.0, above_low=True), _SAMPLED, "Smallest set of tokens with this probability."),
    _same("top_k", Int(-1), _SAMPLED, "This many likeliest tokens; 0 or -1 means all."),
    _same("min_p", Number(0.0, 1.0), _SAMPLED, "Drops tokens below this fraction of the likeliest one."),
    _same(
        "repetition_penalty",
        Number(1e-6, 2.0),  # below, logits run out of float32
        _SAMPLED,
        "Scales the logits of tokens that stand in prompt or output; 1 changes nothing.",
    ),
    _same("frequency_penalty", _PENALTY, _SAMPLED, "Subtracted per occurrence in the output."),
    _same("presence_penalty", _PENALTY, _SAMPLED, "Subtracted where a token stands in the output."),
    _same("logit_bias", Bias(LIMITS.token_ids), _SAMPLED, "Added to the logits of single tokens."),
    _same("allowed_token_ids", Ids(LIMITS.token_ids, least=1), _SAMPLED, "Only these ids."),
    _same("bad_words", Texts(LIMITS.bad_words, LIMITS.stop_bytes), _SAMPLED, "Words that may not appear."),
    _same("seed", Int(-(2**63), 2**64 - 1), _SAMPLED, "Makes sampling repeatable; drawn when unset."),
    _same("n", Anything("an integer"), Api.GENERATE, "Choices, at most as many as the engine allows; 1 by default."),
    _same(
        "num_speculative_tokens",
        Int(0, LIMITS.drafts),
        _SAMPLED,
        "Most draft tokens per step; 0 turns drafts off; changes no token.",
    ),
    # What the answer may be.
    _same("tools", Anything("an array of tools"), Api.TALK | Api.TOKENIZE, "Functions that the model may call."),
    _same(
        "tool_choice",
        Anything('"none", "auto", "required", or an object that names a function'),
        Api.TALK,
        "Whether it must call one, and which; auto where there are tools.",
    ),
    _same("parallel_tool_calls", Bool(), Api.TALK, "More than one call in an answer; true by default."),
    _same(
        "response_format", Anything("an object with a type"), Api.OPENAI, "Text, a JSON object, or JSON by a schema."
    ),
    _same(
        "structured_outputs",
        Anything("an object with one of json, json_object, regex, choice and grammar"),
        Api.OPENAI,
        "What the output must follow.",
    ),
    _same("constraint", Anything("a constraint"), Api.GRPC, "What the output must follow."),
    _same("text", Anything("an object with a format"), Api.RESPONSES, "The format of the answer, as response_format."),
    _same(
        "reasoning_effort",
        OneOf(("none", "minimal", "low", "medium", "high", "xhigh")),
        Api.CHAT | Api.GRPC,
        "How much the model thinks, for templates that know it; none turns thinking off.",
    ),
    _same("reasoning", Anything("an object with effort"), Api.RESPONSES, "How much the model thinks."),
    # When it ends.
    _same("max_tokens", Int(1), Api.GENERATE, "Most tokens of a choice; by default what the context leaves, or 16."),
    Field("max_completion_tokens", Int(1), Api.CHAT, "The newer name of max_tokens.", "max_tokens"),
    Field("max_output_tokens", Int(1), Api.RESPONSES, "Most tokens of the answer.", "max_tokens"),
    _same("min_tokens", Int(0), _SAMPLED, "No end before this many tokens; wins over stops, not over a constraint."),
    _same("stop", Texts(LIMITS.stops, LIMITS.stop_bytes, single=True), _SAMPLED, "Strings that end the text."),
    _same("stop_token_ids", Ids(LIMITS.token_ids), _SAMPLED, "Ids that end the text."),
    Field("include_stop_str_in_output", Bool(), _SAMPLED, "Keeps the stop in the text.", "include_stop"),
    _same("ignore_eos", Bool(), _SAMPLED, "Goes on after the model's end-of-sequence id."),
    # How it is shown.
    _same("stream", Bool(), _SAMPLED, "Answers in deltas."),
    _same(
        "stream_options",
        Flags(("include_usage", "continuous_usage_stats")),
        Api.OPENAI,
        "Token counts at the end of a stream, or on each delta.",
    ),
    _same("stream_interval", Int(1), Api.GENERATE, "Fewest tokens per delta; the first and the last come at once."),
    _same("skip_special_tokens", Bool(), _SAMPLED, "Leaves special tokens out of the text; true by default."),
    Field("logprobs", Bool(), Api.CHAT, "Log probabilities of the tokens.", "show_logprobs"),
    _same("top_logprobs", _TOP, Api.CHAT | Api.RESPONSES, "Likeliest tokens per position; needs logprobs."),
    _same("logprobs", _TOP, Api.COMPLETIONS | Api.GRPC, "Log probabilities, with this many likeliest tokens."),
    _same("prompt_logprobs", _TOP, Api.GENERATE, "The same for the prompt."),
    _same(
        "echo", Bool(), Api.GENERATE, "The prompt's text before the output's; of a chat, the message that is continued."
    ),
    _same("include_reasoning", Bool(), Api.CHAT | Api.GRPC, "Shows reasoning beside the answer; true by default."),
    _same("include", Texts(8, 1024), Api.RESPONSES, 'Parts to add: "message.output_text.logprobs".'),
    _same("return_token_ids", Bool(), Api.GENERATE, "Token ids beside the text."),
    _same("return_token_strs", Bool(), Api.TOKENIZE, "The vocabulary's spelling of each id."),
    _same("return_tokens_as_token_ids", Bool(), Api.OPENAI, 'Spells tokens in logprobs as "token_id:17".'),
    _same("pooling", OneOf(("mean", "last")), Api.EMBEDDINGS, "Mean over all tokens, as by default, or the last one."),
    _same("dimensions", Int(1), Api.EMBEDDINGS, "Length of the vectors, cut from the front and normalised again."),
    _same(
        "encoding_format", OneOf(("float", "base64")), Api.EMBEDDINGS, "Numbers, or base64 of little-endian float32."
    ),
    # How it is treated.
    _same("priority", Int(-(2**31)), _TREATED, "Lower is more urgent; 0 by default."),
    _same("cache_salt", Text(longest=1024, empty=False), _TREATED, "Only equal salts share cached prefixes."),
    _same("request_id", Text(longest=256, empty=False), _TREATED, "The client's own id, echoed and logged."),
    _same("user", Text(longest=1024), _LABELLED, "Who the client's user is; logged with the request."),
    _same("safety_identifier", Text(longest=1024), Api.CHAT | Api.RESPONSES, "The same by its newer name; logged."),
    _same("prompt_cache_key", Text(longest=1024), Api.CHAT | Api.RESPONSES, "A label of similar prompts; logged."),
    _same("metadata", Labels(16, 64, 512), Api.CHAT | Api.RESPONSES, "Labels; logged, and shown by /v1/responses."),
)


@dataclass(slots=True, frozen=True)
class Refused:
    """A known field whose feature is not built; its neutral values ask for nothing and pass."""

    name: str
    apis: Api
    neutral: tuple[Json, ...] = ()


_PLAIN = Api.OPENAI | Api.RESPONSES

REFUSED: tuple[Refused, ...] = (
    Refused("functions", Api.CHAT, ([],)),
    Refused("function_call", Api.CHAT, ("none", "auto")),
    Refused("guided_json", Api.OPENAI),
    Refused("guided_regex", Api.OPENAI),
    Refused("guided_choice", Api.OPENAI),
    Refused("guided_grammar", Api.OPENAI),
    Refused("thinking_token_budget", Api.CHAT),
    Refused("verbosity", Api.CHAT, ("medium",)),
    Refused("audio", Api.CHAT),
    Refused("modalities", Api.CHAT, (["text"],)),
    Refused("prediction", Api.CHAT),
    Refused("web_search_options", Api.CHAT),
    Refused("prompt_cache_retention", Api.CHAT | Api.RESPONSES),
    Refused("store", Api.CHAT | Api.RESPONSES, (False,)),
    Refused("service_tier", Api.CHAT | Api.RESPONSES, ("auto", "default")),
    Refused("tools", Api.COMPLETIONS, ([],)),
    Refused("suffix", Api.COMPLETIONS, ("",)),
    Refused("best_of", Api.COMPLETIONS, (1,)),
    Refused("use_beam_search", Api.OPENAI, (False,)),
    Refused("length_penalty", Api.OPENAI, (1, 1.0)),
    Refused("spaces_between_special_tokens", Api.OPENAI, (True,)),
    Refused("prompt_embeds", Api.COMPLETIONS),
    Refused("media_io_kwargs", Api.COMPLETIONS),
    Refused("mm_processor_kwargs", Api.COMPLETIONS),
    Refused("return_token_offsets", Api.OPENAI, (False,)),
    Refused("kv_transfer_params", Api.OPENAI),
    Refused("vllm_xargs", Api.OPENAI),
    Refused("repetition_detection", Api.OPENAI),
    Refused("logprob_token_ids", Api.OPENAI),
    Refused("session_id", Api.OPENAI),
    Refused("previous_response_id", Api.RESPONSES),
    Refused("conversation", Api.RESPONSES),
    Refused("prompt", Api.RESPONSES),
    Refused("background", Api.RESPONSES, (False,)),
    Refused("truncation", Api.RESPONSES, ("disabled",)),
    Refused("max_tool_calls", Api.RESPONSES),
    Refused("stream_options", Api.RESPONSES, ({"include_obfuscation": False},)),
)


def _rows(api: Api) -> dict[str, Field | Refused]:
    rows: dict[str, Field | Refused] = {row.name: row for row in REFUSED if api in row.apis}
    return rows | {row.name: row for row in FIELDS if api in row.apis}


_ROWS: Mapping[Api, Mapping[str, Field | Refused]] = {
    api: _rows(api)
    for api in (
        Api.CHAT,
        Api.COMPLETIONS,
        Api.GRPC,
        Api.TOKENIZE,
        Api.DETOKENIZE,
        Api.RESPONSES,
        Api.EMBEDDINGS,
    )
}


_AS_JSON = ("chat_template_kwargs", "tools", "documents", "media_io_kwargs", "mm_processor_kwargs")
_GRPC_NAMES: Mapping[str, str] = {
    **{
        name: f"options.{name}"
        for name in (
            "stream",
            "stream_interval",
            "return_token_ids",
            "priority",
            "cache_salt",
            "request_id",
            "add_special_tokens",
            "truncate_prompt_tokens",
            "truncation_side",
        )
    },
    **{
        name: name
        for name in (
            "echo",
            "add_generation_prompt",
            "continue_final_message",
            "tool_choice",
            "parallel_tool_calls",
            "chat_template",
            "reasoning_effort",
            "include_reasoning",
        )
    },
    **{name: f"{name}_json" for name in _AS_JSON},
}
"""How the gRPC messages spell fields that are not sampling options."""


@dataclass(slots=True, frozen=True)
class Caller:
    """The call that a request came by, and how it spells fields.

    prefix  before sampling options; "" for JSON, where all is flat
    within  the part of the request that has all of these fields, before each of them
    """

    api: Api
    prefix: str = ""
    within: str = ""

    def spell(self, name: str) -> str:
        """A field as the client knows it."""
        return self.within + (_GRPC_NAMES.get(name, self.prefix + name) if self.prefix else name)

    @property
    def turns(self) -> str:
        """The conversation as the client knows it."""
        return "input" if self.api is Api.RESPONSES else f"{self.within}messages"


def accepted(api: Api) -> dict[str, Field]:
    """The rows that a call accepts, by name."""
    return {name: row for name, row in _ROWS[api].items() if isinstance(row, Field)}


def read_fields(values: Mapping[str, object], api: Api, *, prefix: str = "") -> Asked:
    """Checks each value of a request by itself. `prefix` is how the caller spells the names ("sampling.")."""
    rows = _ROWS[api]
    caller = Caller(api, prefix)
    asked: dict[str, Any] = {}
    for name, value in values.items():
        row = rows.get(name)
        field = caller.spell(name)
        if row is None:
            known = [known for known, row in rows.items() if isinstance(row, Field)]
            raise InvalidArgument(f"{field}: unknown field{nearest(name, known)}", field=field)
        if value is None:
            continue
        if isinstance(row, Refused):
            _refuse(row, value, field, api)
            continue
        read = row.kind.read(value, field)
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
