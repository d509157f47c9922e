from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from protos import common_pb2
from services.common.errors import InvalidArgument, Unimplemented
from services.gateway.fields import FIELDS, REFUSED, Api, Asked, accepted, read_fields
from services.gateway.kinds import Ids, Int, Number
from services.worker.wire import decode_sampling

APIS = (
    Api.CHAT, Api.COMPLETIONS, Api.GRPC, Api.TOKENIZE, Api.DETOKENIZE, Api.RESPONSES, Api.EMBEDDINGS,
)  # fmt: skip
GOOD: dict[str, Any] = {
    "model": "m", "messages": [], "prompt": "x", "input": "x", "instructions": "i", "tokens": [1],
    "add_special_tokens": True, "add_generation_prompt": False, "continue_final_message": True,
    "chat_template_kwargs": {"a": 1}, "chat_template": "x", "documents": [],
    "media_io_kwargs": {"video": {"fps": 2.0}}, "mm_processor_kwargs": {"max_pixels": 4096},
    "truncate_prompt_tokens": 5,
    "truncation_side": "right",
    "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.5, "repetition_penalty": 1.5, "frequency_penalty": 0.5,
    "presence_penalty": -0.5, "logit_bias": {"1": 2}, "allowed_token_ids": [1], "bad_words": ["x"], "seed": 7, "n": 2,
    "num_speculative_tokens": 0,
    "tools": [], "tool_choice": "auto", "parallel_tool_calls": False, "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"}, "constraint": ("regex", "a"), "text": {"format": {"type": "text"}},
    "reasoning_effort": "low", "reasoning": {"effort": "low"},
    "max_tokens": 9, "max_completion_tokens": 9, "max_output_tokens": 9, "min_tokens": 1, "stop": ["x"],
    "stop_token_ids": [1], "include_stop_str_in_output": True, "ignore_eos": True,
    "stream": True, "stream_options": {"include_usage": True}, "stream_interval": 2, "skip_special_tokens": False,
    "top_logprobs": 2, "prompt_logprobs": 2, "echo": True, "include_reasoning": False,
    "include": ["message.output_text.logprobs"], "return_token_ids": True, "return_token_strs": True,
    "return_tokens_as_token_ids": True, "pooling": "last", "dimensions": 8, "encoding_format": "base64",
    "priority": -1, "cache_salt": "s", "request_id": "r", "user": "u", "safety_identifier": "u",
    "prompt_cache_key": "k", "metadata": {"a": "b"},
}  # fmt: skip


def value_of(name: str, api: Api) -> Any:
    return (api is Api.CHAT or 3) if name == "logprobs" else GOOD[name]


@pytest.mark.parametrize("api", APIS)
def test_every_accepted_field_changes_what_was_asked(api: Api) -> None:
    for name, row in accepted(api).items():
        asked = read_fields({name: value_of(name, api)}, api)
        changed = {field.name for field in dataclasses.fields(Asked) if getattr(asked, field.name) is not None}
        assert changed == {row.to}, name
        assert row.meaning


def test_every_value_that_was_asked_for_has_a_row() -> None:
    assert {row.to for row in FIELDS} == {field.name for field in dataclasses.fields(Asked)}
    assert {row.name for row in FIELDS} - {"logprobs"} == GOOD.keys()


@pytest.mark.parametrize("api", APIS)
def test_null_is_unset(api: Api) -> None:
    assert read_fields(dict.fromkeys(accepted(api)), api) == Asked()


def test_no_row_stands_twice() -> None:
    for api in APIS:
        names = [row.name for row in (*FIELDS, *REFUSED) if api in row.apis]
        assert len(names) == len(set(names)), api


@pytest.mark.parametrize("api", APIS)
def test_known_features_that_are_not_built_are_refused_by_name(api: Api) -> None:
    for row in REFUSED:
        if api in row.apis:
            with pytest.raises(Unimplemented if api is Api.GRPC else InvalidArgument, match=row.name) as caught:
                read_fields({row.name: {"some": "thing"}}, api)
            assert caught.value.field == row.name
            for neutral in (None, *row.neutral):
                assert read_fields({row.name: neutral}, api) == Asked()


def test_neutral_values_are_exact() -> None:
    for name, value in (("best_of", True), ("use_beam_search", 0), ("suffix", "x"), ("length_penalty", True)):
        with pytest.raises(InvalidArgument):
            read_fields({name: value}, Api.COMPLETIONS)


def test_an_unknown_field_names_the_nearest_one() -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'temperature'") as caught:
        read_fields({"temprature": 1}, Api.CHAT)
    assert caught.value.field == "temprature"
    for name, meant in (("maxTokens", "max_tokens"), ("Top-P", "top_p"), ("message", "messages"), ("modle", "model")):
        with pytest.raises(InvalidArgument, match=f"did you mean '{meant}'"):
            read_fields({name: 1}, Api.CHAT)
    for name in ("stopper_x", "top_a", "n_predict", "session", "typical_p", "extra_body", "é", ""):
        with pytest.raises(InvalidArgument, match=r"unknown field$"):
            read_fields({name: 1}, Api.CHAT)
    with pytest.raises(InvalidArgument, match="unknown field"):
        read_fields({"messages": []}, Api.COMPLETIONS)


def test_grpc_names_have_their_prefix() -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_fields({"top_p": 2.0}, Api.GRPC, prefix="sampling.")
    assert caught.value.field == "sampling.top_p"
    with pytest.raises(InvalidArgument) as caught:
        read_fields({"cache_salt": ""}, Api.GRPC, prefix="sampling.")
    assert caught.value.field == "options.cache_salt"
    with pytest.raises(InvalidArgument) as caught:
        read_fields({"echo": 1}, Api.GRPC, prefix="sampling.")
    assert caught.value.field == "echo"
    with pytest.raises(InvalidArgument) as caught:
        read_fields({"chat_template_kwargs": []}, Api.GRPC, prefix="sampling.")
    assert caught.value.field == "chat_template_kwargs_json"


def test_the_smallest_values_are_ones_that_the_worker_takes() -> None:
    asked = read_fields({"repetition_penalty": 1e-6, "top_p": 1e-45}, Api.COMPLETIONS)
    params = common_pb2.SamplingParams(repetition_penalty=asked.repetition_penalty, top_p=asked.top_p)
    decode_sampling(params, seed=0, vocab_size=10)
    with pytest.raises(InvalidArgument, match="repetition_penalty"):
        read_fields({"repetition_penalty": 9e-7}, Api.COMPLETIONS)


def test_two_names_of_one_field_must_agree() -> None:
    assert read_fields({"max_tokens": 5, "max_completion_tokens": 5}, Api.CHAT).max_tokens == 5
    with pytest.raises(InvalidArgument, match="contradicts"):
        read_fields({"max_tokens": 5, "max_completion_tokens": 6}, Api.CHAT)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, -(10**400), "nan", "1", True, [1], {}])
def test_no_number_is_taken_that_is_none(api: Api, value: object) -> None:
    rows = {name: row for name, row in accepted(api).items() if isinstance(row.kind, Int | Number)}
    assert rows or api is Api.DETOKENIZE or api is Api.TOKENIZE
    for name in rows:
        with pytest.raises(InvalidArgument) as caught:
            read_fields({name: value}, api)
        assert caught.value.field == name
        assert len(caught.value.message) < 300


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("value", [[1.5], [True], ["1"], [[1]], "12", {"a": 1}, 5])
def test_no_list_of_ids_is_taken_that_is_none(api: Api, value: object) -> None:
    for name, row in accepted(api).items():
        if isinstance(row.kind, Ids):
            with pytest.raises(InvalidArgument) as caught:
                read_fields({name: value}, api)
            assert caught.value.field == name
