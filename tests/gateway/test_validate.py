from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidArgument
from services.gateway.fields import Api, Caller, accepted, read_fields
from services.gateway.messages import read_messages
from services.gateway.request import Constraint, ResponseOptions, SamplingParams, TextOptions
from services.gateway.validate import (
    ModelFacts,
    check_prompt,
    forbidding,
    read_prompts,
    response_options,
    sampling_params,
    text_options,
)

FACTS = ModelFacts("toy", vocab_size=100, max_model_len=64, max_n=4, eos_token_ids=(1, 2))


def sampling(
    values: dict[str, Any], *, api: Api = Api.CHAT, facts: ModelFacts = FACTS, prompt: int = 10
) -> SamplingParams:
    asked = read_fields(values, api)
    return sampling_params(asked, facts, Caller(api), prompt_tokens=prompt, echoes_prompt=bool(asked.echo))


def test_defaults() -> None:
    got = sampling({})
    assert got == SamplingParams(max_tokens=54, seed=got.seed, eos_token_ids=(1, 2))
    assert sampling({}).seed != sampling({}).seed
    assert sampling({}, api=Api.COMPLETIONS).max_tokens == 16
    assert sampling({}, api=Api.COMPLETIONS, prompt=60).max_tokens == 4
    assert sampling({}, api=Api.GRPC).max_tokens == 54


def test_the_models_own_defaults_stand_before_ours_and_after_the_clients() -> None:
    defaults = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 20,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "max_tokens": 7,
    }
    facts = ModelFacts("toy", 100, 64, 4, (1,), defaults)
    got = sampling({}, facts=facts)
    assert (got.temperature, got.top_p, got.top_k, got.min_p, got.repetition_penalty) == (0.25, 0.5, 20, 0.125, 1.5)
    assert got.max_tokens == 7
    asked = sampling({"temperature": 0, "top_k": -1, "max_tokens": 30}, facts=facts)
    assert (asked.temperature, asked.top_k, asked.max_tokens) == (0.0, 0, 30)


def test_every_sampling_field_arrives() -> None:
    got = sampling(
        {
            "temperature": 0.5, "top_p": 0.25, "top_k": 5, "min_p": 0.125, "repetition_penalty": 1.5,
            "frequency_penalty": 1, "presence_penalty": -1, "logit_bias": {"3": -100}, "allowed_token_ids": [4, 4, 5],
            "seed": -1, "n": 3, "max_tokens": 20, "min_tokens": 5, "stop_token_ids": [9], "ignore_eos": True,
            "logprobs": 4, "prompt_logprobs": 0, "num_speculative_tokens": 0,
        },
        api=Api.GRPC,
    )  # fmt: skip
    assert got == SamplingParams(
        20, 2**64 - 1, 3, 5, (), (9,), 0.5, 0.25, 5, 0.125, 1.5, 1.0, -1.0, ((3, -100.0),), (4, 5), (), 4, 0, 0
    )


def test_lengths_meet_the_context() -> None:
    assert sampling({"max_tokens": 1000}).max_tokens == 54
    assert sampling({"min_tokens": 1000}).min_tokens == 54
    assert sampling({"min_tokens": 30}, api=Api.COMPLETIONS).max_tokens == 30
    with pytest.raises(InvalidArgument) as caught:
        sampling({"min_tokens": 5, "max_tokens": 4})
    assert caught.value.field == "min_tokens"


@pytest.mark.parametrize(
    ("values", "logprobs", "prompt_logprobs", "api"),
    [
        ({}, None, None, Api.CHAT),
        ({"logprobs": True}, 0, None, Api.CHAT),
        ({"logprobs": True, "top_logprobs": 0}, 0, None, Api.CHAT),
        ({"logprobs": True, "top_logprobs": 5}, 5, None, Api.CHAT),
        ({"logprobs": False, "top_logprobs": 0}, None, None, Api.CHAT),
        ({"logprobs": 0}, 0, None, Api.COMPLETIONS),
        ({"logprobs": 3, "echo": True}, 3, 3, Api.COMPLETIONS),
        ({"logprobs": 3, "echo": True, "prompt_logprobs": 5}, 3, 5, Api.COMPLETIONS),
        ({"echo": True}, None, None, Api.COMPLETIONS),
    ],
)
def test_logprobs(values: dict[str, Any], logprobs: int | None, prompt_logprobs: int | None, api: Api) -> None:
    got = sampling(values, api=api)
    assert (got.logprobs, got.prompt_logprobs) == (logprobs, prompt_logprobs)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"stop_token_ids": [107]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids"),
        ({"allowed_token_ids": [100]}, "allowed_token_ids"),
        ({"allowed_token_ids": [4, -1]}, "allowed_token_ids"),
        ({"logit_bias": {"100": -100}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        *(({"n": n}, "n") for n in (5, 0, -1, 1.5, True, "2", [1], {}, math.nan, math.inf, 10**400)),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": math.inf}, "top_p"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_bad_values_name_their_field(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        sampling(values)
    assert caught.value.field == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("value", "prompts"),
    [
        ("a fox", ["a fox"]),
        ("", [""]),
        ([1, 2], [(1, 2)]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
        (["a", [1]], ["a", (1,)]),
    ],
)
def test_prompts(value: object, prompts: list[Any]) -> None:
    assert read_prompts(value) == prompts


@pytest.mark.parametrize(
    "value", [None, [], [[]], 5, {}, [1, "a"], [True], [1.5], [["a"]], [None], "\ud800", ["a"] * 129]
)
def test_bad_prompts(value: object) -> None:
    with pytest.raises(InvalidArgument, match="prompt"):
        read_prompts(value)


def test_prompts_are_checked_against_the_model() -> None:
    check_prompt([99] * 63, FACTS, "prompt")
    with pytest.raises(InvalidArgument, match="empty"):
        check_prompt([], FACTS, "prompt")
    with pytest.raises(InvalidArgument, match=r"64 tokens.*64 tokens") as caught:
        check_prompt([1] * 64, FACTS, "messages")
    assert (caught.value.reason, caught.value.field) == ("CONTEXT_LENGTH_EXCEEDED", "messages")
    for bad in (-1, 100, 10**40):
        with pytest.raises(InvalidArgument, match="prompt"):
            check_prompt([1, bad], FACTS, "prompt")


def test_text_and_response_options() -> None:
    asked = read_fields(
        {
            "stop": ["b", "a", "b"], "include_stop_str_in_output": True, "skip_special_tokens": False, "echo": True,
            "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "logprobs": 2,
            "return_token_ids": True,
        },
        Api.COMPLETIONS,
    )  # fmt: skip
    assert text_options(asked) == TextOptions(("b", "a"), include_stop=True, skip_special_tokens=False)
    params = sampling_params(asked, FACTS, Caller(Api.COMPLETIONS), prompt_tokens=5)
    shown = response_options(asked, params, Caller(Api.COMPLETIONS))
    assert shown == ResponseOptions(True, True, True, 2, True, True)
    assert shown.needs_tokens
    assert not ResponseOptions().needs_tokens
    with pytest.raises(InvalidArgument, match="needs stream"):
        response_options(read_fields({"stream_options": {}}, Api.CHAT), params, Caller(Api.CHAT))


names = st.sampled_from(sorted(accepted(Api.CHAT) | accepted(Api.COMPLETIONS)))
numbers = st.integers() | st.floats() | st.sampled_from([0, 1, 0.5, 2, 20, 63, 64, 100])
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(names, values, max_size=6), st.sampled_from([Api.CHAT, Api.COMPLETIONS]), st.integers(1, 63))
def test_any_body_is_honoured_or_refused(body: dict[str, Any], api: Api, prompt: int) -> None:
    try:
        asked = read_fields(body, api)
        if api is Api.CHAT:
            read_messages(asked.messages or [{"role": "user", "content": "x"}])
        else:
            read_prompts(asked.prompt or "x")
        params = sampling_params(asked, FACTS, Caller(api), prompt_tokens=prompt)
        response_options(asked, params, Caller(api))
    except InvalidArgument:
        return
    assert 1 <= params.max_tokens <= 64 - prompt
    assert 0 <= params.min_tokens <= params.max_tokens
    assert 1 <= params.n <= 4
    assert 0 <= params.seed < 2**64
    assert all(math.isfinite(value) for value in (params.temperature, params.top_p, params.min_p))


@pytest.mark.parametrize("n", [0, 5, "2"])
def test_one_range_is_told_for_n(n: object) -> None:
    with pytest.raises(InvalidArgument, match="an integer from 1 to 4, not"):
        sampling({"n": n})


@pytest.mark.parametrize(("api", "logprobs"), [(Api.CHAT, {"logprobs": True}), (Api.COMPLETIONS, {"logprobs": 0})])
def test_tokens_are_spelled_as_ids_where_there_are_log_probabilities(api: Api, logprobs: dict[str, Any]) -> None:
    def shown(values: dict[str, Any]) -> ResponseOptions:
        return response_options(read_fields(values, api), sampling(values, api=api), Caller(api))

    assert shown({"return_tokens_as_token_ids": True, **logprobs}).tokens_as_ids
    assert not shown({"return_tokens_as_token_ids": False}).tokens_as_ids
    with pytest.raises(InvalidArgument, match="needs logprobs") as caught:
        shown({"return_tokens_as_token_ids": True})
    assert caught.value.field == "return_tokens_as_token_ids"


@pytest.mark.parametrize(
    ("values", "constraint", "field"),
    [
        ({}, None, None),
        ({"min_tokens": 1}, None, "sampling.min_tokens"),
        ({"min_tokens": 1}, Constraint("regex", "a", place="sampling.constraint.regex"), "sampling.constraint.regex"),
        ({"min_tokens": 1, "bad_words": ["a"]}, None, "sampling.bad_words"),
        ({"bad_words": ["a"], "allowed_token_ids": [1]}, None, "sampling.allowed_token_ids"),
    ],
)
def test_which_field_leaves_fewest_tokens(
    values: dict[str, Any], constraint: Constraint | None, field: str | None
) -> None:
    assert forbidding(read_fields(values, Api.GRPC), Caller(Api.GRPC, "sampling."), constraint) == field
