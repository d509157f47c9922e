"""Stream chunks and whole answers from deltas made by hand: what a client puts together is the whole answer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming._deltas import accumulate_delta

from services.common.errors import Unavailable
from services.gateway.pipeline import ChoicePipeline
from services.gateway.request import (
    ChoiceTokens,
    Delta,
    Finish,
    FinishReason,
    Position,
    ResponseOptions,
    TextOptions,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from services.gateway.rest.chat_documents import Chat
from services.gateway.rest.completion_documents import Completion
from services.gateway.rest.documents import Head, Prompt, Shown
from services.gateway.rest.shapes import ChatLogprobs, CompletionLogprobs
from services.gateway.stops import StopMatcher
from tests.gateway import toys

HEAD = Head("chatcmpl-1", 1_700_000_000, "toy")
NOTHING = Prompt((), ())
STOP = Finish(FinishReason.EOS)
CALLS = Finish(FinishReason.TOOL_CALLS)


def shown(*, parsed: bool = True, usage: Usage | None = None, **options: Any) -> Shown:
    counts = usage or Usage(3)
    return Shown(ResponseOptions(**options), toys.vocabulary("byte_level"), True, lambda: counts, parsed)


def chunks_of(data: bytes) -> list[dict[str, Any]]:
    events = data.decode().split("\n\n")
    assert events.pop() == ""
    if events[-1] == "data: [DONE]":
        events.pop()
    return [json.loads(event.removeprefix("data: ")) for event in events]


def streamed(chat: Chat, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    return chunks_of(chat.first() + b"".join(chat.chunk(0, delta) for delta in deltas) + chat.last())


def message_of(chunks: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What the official client makes of the deltas of a choice, without the numbers of its calls."""
    message: dict[object, object] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                message = accumulate_delta(message, json.loads(json.dumps(choice["delta"])))
    got: dict[str, Any] = json.loads(json.dumps(message))
    for number, call in enumerate(got.get("tool_calls", [])):
        assert call.pop("index") == number
    return got


def piece(index: int, arguments: str, name: str | None = None) -> ToolCallDelta:
    return ToolCallDelta(index, arguments, f"call_{index:024x}" if name else None, name)


def test_reasoning_text_and_calls_come_as_the_official_client_expects_them() -> None:
    deltas = [
        Delta(0, 0, "", (1,), reasoning="hm"),
        Delta(0, 1, "Let me see.", (2,)),
        Delta(0, 2, "", (3,), tool_calls=(piece(0, "", "look"),)),
        Delta(0, 3, "", (4,), tool_calls=(piece(0, '{"a"'),)),
        Delta(0, 4, "", (5,), tool_calls=(piece(0, ": 1}"), piece(1, "{}", "wait"))),
        Delta(0, 5, "", (6,), finish=CALLS),
    ]
    chunks = streamed(Chat(HEAD, shown(include_usage=True), NOTHING, 1), deltas)
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": None},
        {"reasoning_content": "hm"},
        {"content": "Let me see."},
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": f"call_{0:024x}",
                    "type": "function",
                    "function": {"name": "look", "arguments": ""},
                }
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]},
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": ": 1}"}},
                {
                    "index": 1,
                    "id": f"call_{1:024x}",
                    "type": "function",
                    "function": {"name": "wait", "arguments": "{}"},
                },
            ]
        },
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * 6 + ["tool_calls"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == 3
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_a_message_of_calls_alone_has_no_content() -> None:
    delta = Delta(0, 0, "", (1,), finish=CALLS, tool_calls=(piece(0, "{}", "look"),))
    whole = json.loads(Chat(HEAD, shown(), NOTHING, 1).whole([delta]))
    assert whole["choices"][0]["message"]["content"] is None
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert "reasoning_content" not in whole["choices"][0]["message"]
    plain = json.loads(Chat(HEAD, shown(parsed=False), NOTHING, 1).whole([Delta(0, 0, "", (1,), finish=STOP)]))
    assert plain["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None}


def split(text: str, cuts: Sequence[int]) -> list[str]:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
CUTS = st.lists(st.integers(0, 20), max_size=4)


@settings(max_examples=60, deadline=None)
@given(reasoning=TEXT, text=TEXT, calls=st.lists(TEXT, max_size=3), cuts=CUTS, merged=st.booleans(), data=st.data())
def test_however_an_answer_is_cut_a_client_puts_the_same_message_together(
    reasoning: str, text: str, calls: list[str], cuts: list[int], merged: bool, data: st.DataObject
) -> None:
    pieces = [Delta(0, 0, "", (), reasoning=part) for part in split(reasoning, cuts)]
    pieces += [Delta(0, 0, part, ()) for part in split(text, cuts)]
    for index, arguments in enumerate(calls):
        first, *rest = ["", *split(arguments, cuts)]
        pieces.append(Delta(0, 0, "", (), tool_calls=(piece(index, first, "f"),)))
        pieces += [Delta(0, 0, "", (), tool_calls=(piece(index, part),)) for part in rest]
    if merged and reasoning and text:
        at = len(split(reasoning, cuts)) - 1
        pieces[at : at + 2] = [Delta(0, 0, pieces[at + 1].text, (), reasoning=pieces[at].reasoning)]
    if pieces and data.draw(st.booleans()):
        pieces[-1].finish = STOP
    else:
        pieces.append(Delta(0, 0, "", (), finish=STOP))
    options = shown(
        continuous_usage=data.draw(st.booleans()),
        include_usage=data.draw(st.booleans()),
        return_token_ids=data.draw(st.booleans()),
        parsed=bool(reasoning or calls) or data.draw(st.booleans()),
    )
    whole_calls = tuple(piece(index, arguments, "f") for index, arguments in enumerate(calls))
    whole = Delta(0, 0, text, (), finish=STOP, reasoning=reasoning, tool_calls=whole_calls)
    answer = json.loads(Chat(HEAD, options, NOTHING, 1).whole([whole]))
    chunks = streamed(Chat(HEAD, options, NOTHING, 1), pieces)
    assert {**message_of(chunks), "refusal": None} == answer["choices"][0]["message"]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]


def test_choices_are_told_apart() -> None:
    deltas = [
        Delta(1, 0, "b", (1,)),
        Delta(0, 0, "a", (1,), reasoning="r"),
        Delta(0, 1, "", (2,), finish=STOP),
        Delta(1, 1, "c", (2,), finish=Finish(FinishReason.LENGTH)),
    ]
    chunks = streamed(Chat(HEAD, shown(), NOTHING, 2), deltas)
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1, 1, 0, 0, 1, 1]
    assert message_of(chunks, 0) == {"role": "assistant", "reasoning_content": "r", "content": "a"}
    assert message_of(chunks, 1) == {"role": "assistant", "content": "bc"}
    ends = {c["index"]: c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]}
    assert ends == {0: "stop", 1: "length"}


def test_usage_on_every_chunk_counts_what_has_come() -> None:
    usage = Usage(3)
    chat = Chat(HEAD, shown(usage=usage, include_usage=True, continuous_usage=True), NOTHING, 1)
    data = chat.first()
    for count, delta in enumerate([Delta(0, 0, "a", (1,)), Delta(0, 1, "", (2,), reasoning="b")], 1):
        usage.completion_tokens = count
        data += chat.chunk(0, delta)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks_of(data + chat.last())] == [0, 1, 2, 2]


def positions(*ids: int) -> tuple[Position, ...]:
    return tuple((TokenLogprob(i, -0.5, 1), TokenLogprob(i, -0.5, 1), TokenLogprob(0, float("-inf"), 9)) for i in ids)


def test_logprobs_stand_beside_reasoning_text_and_calls_alike() -> None:
    deltas = [
        Delta(0, 0, "", (65,), positions(65), reasoning="`", written=("`",)),
        Delta(0, 1, "a", (66,), positions(66), texts=("a",), written=("a",)),
        Delta(0, 2, "", (67, 68), positions(67, 68), tool_calls=(piece(0, "{}", "f"),), written=("b", "c")),
        Delta(0, 4, "", (69,), positions(69), finish=CALLS),
    ]
    chunks = streamed(Chat(HEAD, shown(top_logprobs=2, tokens_as_ids=True, return_token_ids=True), NOTHING, 1), deltas)
    choices = [chunk["choices"][0] for chunk in chunks[2:]]
    assert [token for choice in choices for token in choice["token_ids"]] == [65, 66, 67, 68, 69]
    entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in (65, 66, 67, 68, 69)]
    assert [top["logprob"] for top in entries[0]["top_logprobs"]] == [-0.5, -9999.0]
    assert entries[0]["bytes"] == list(toys.vocabulary("byte_level").token_bytes(65))
    assert [bytes(entry["bytes"]).decode() for entry in entries] == ["`", "a", "b", "c", ""], "the last ends the answer"
    assert chunks[0]["choices"] == []
    assert chunks[0]["prompt_token_ids"] == []


def test_what_was_asked_about_the_prompt_comes_before_the_first_choice() -> None:
    prompt = Prompt((70, 71), ((), positions(71)[0]))
    chat = Chat(HEAD, shown(return_token_ids=True), prompt, 1)
    whole = json.loads(chat.whole([Delta(0, 0, "a", (65,), finish=STOP)]))
    first, *rest = chunks_of(chat.first())
    for document in (first, whole):
        assert document["prompt_token_ids"] == [70, 71]
        nothing, second = document["prompt_logprobs"]
        assert nothing is None
        assert {token_id: (entry["logprob"], entry["rank"]) for token_id, entry in second.items()} == {
            "71": (-0.5, 1),
            "0": (-9999.0, 9),
        }
    assert not any("prompt_logprobs" in chunk for chunk in rest)


def test_a_stream_that_fails_has_an_error_and_no_end() -> None:
    error = Unavailable("the engine is gone", reason="ENGINE_LOST")
    for documents in (Chat(HEAD, shown(), NOTHING, 1), Completion(HEAD, shown(), [NOTHING], 1)):
        (event,) = documents.failed(error).decode().split("\n\n")[:-1]
        assert json.loads(event.removeprefix("data: "))["error"] == {
            "message": "the engine is gone",
            "type": error.kind,
            "param": None,
            "code": "engine_lost",
        }


def test_tokens_of_completions_may_be_spelled_as_ids() -> None:
    prompt = Prompt((70, 71), ((), *positions(71)))
    completion = Completion(HEAD, shown(top_logprobs=1, tokens_as_ids=True, echo=True), [prompt], 1)
    delta = Delta(0, 0, "ab", (65,), positions(65), STOP, texts=("b",))
    (choice,) = chunks_of(completion.chunk(0, delta))[0]["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:70", "token_id:71", "token_id:65"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"] == [None, {"token_id:71": -0.5}, {"token_id:65": -0.5}]


def test_the_tokens_of_an_echo_begin_where_their_text_does() -> None:
    """As a prefix decoded tells, less the character that is not complete in it."""
    vocabulary = toys.vocabulary("byte_level")
    of_byte = {vocabulary.token_bytes(i): i for i in range(len(vocabulary))}
    ids = [of_byte[bytes((byte,))] for byte in "é🔥".encode() + b"\xf0\x9fy\xe2"]
    decode = toys.tokenizer("byte_level").decode
    echo = decode(ids)
    offsets = CompletionLogprobs(vocabulary, 0).of(Delta(0, 0, echo, ()), ids, positions(*ids))["text_offset"]
    inside = (1, 3, 4, 5, 7)  # in a character that has begun
    assert offsets == [len(decode(ids[:i])) - (i in inside) for i in range(len(ids))]
    assert offsets == [0, 0, 1, 1, 1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "metaspace"])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_bytes_of_tokens_are_the_text_wherever_it_is_cut(kind: str, data: st.DataObject) -> None:
    """Random tokens, many of them pieces of characters, with stop strings, dealt out in any way."""
    vocabulary = toys.vocabulary(kind)
    pieces = [toys.ids(kind, text) for text in ("🔥", "é", " a", "ab", "日")]
    runs = data.draw(st.lists(st.one_of(st.sampled_from(pieces), st.tuples(st.integers(0, len(vocabulary) - 1)))))
    ids = tuple(token_id for run in runs for token_id in run)
    options = TextOptions(
        stop=data.draw(st.sampled_from([(), ("b",), ("é", "🔥"), (" a",)])),
        include_stop=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
    )
    end = data.draw(st.sampled_from([FinishReason.EOS, FinishReason.LENGTH, FinishReason.STOP_ID]))
    told = []
    for cuts in (data.draw(CUTS), []):
        matcher = StopMatcher(options.stop) if options.stop else None
        pipeline = ChoicePipeline(0, vocabulary, options, matcher=matcher, needs_tokens=True)
        logprobs = ChatLogprobs(vocabulary, 0, options.skip_special_tokens)
        bounds = sorted({0, *(cut % max(len(ids), 1) for cut in cuts)})
        entries, text = [], ""
        for start, stop in itertools.pairwise([*bounds, len(ids)]):
            finish = end if start == bounds[-1] else FinishReason.NONE
            pipeline.push(ChoiceTokens(0, start, ids[start:stop], finish, positions(*ids[start:stop])))
            if (delta := pipeline.take()) is not None:
                text += delta.text
                entries += logprobs.of(delta)["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()
        told.append(entries)
    assert told[0] == told[1]


def test_pieces_of_a_character_that_may_begin_a_stop_string_wait_with_it() -> None:
    vocabulary = toys.vocabulary("byte_level")
    of_byte = {vocabulary.token_bytes(i): i for i in range(len(vocabulary))}
    for last, text in (("b", "a"), ("c", "a🔥c")):
        ids = tuple(of_byte[bytes((byte,))] for byte in f"a🔥{last}".encode())
        options = TextOptions(stop=("🔥b",))
        pipeline = ChoicePipeline(0, vocabulary, options, matcher=StopMatcher(options.stop), needs_tokens=True)
        logprobs = ChatLogprobs(vocabulary, 0, True)
        told = []
        for start, end, finish in ((0, 5, FinishReason.NONE), (5, 6, FinishReason.LENGTH)):
            pipeline.push(ChoiceTokens(0, start, ids[start:end], finish, positions(*ids[start:end])))
            delta = pipeline.take()
            assert delta is not None
            told.append((delta.text, delta.token_ids, [bytes(e["bytes"]) for e in logprobs.of(delta)["content"]]))
        assert told[0] == ("a", ids[:1], [b"a"])
        assert "".join(part for part, _, _ in told) == text
        assert b"".join(data for _, _, own in told for data in own) == text.encode()
        assert told[1][1] == ids[1:]


def test_a_broken_character_has_its_bytes_before_the_next_one_is_complete() -> None:
    vocabulary = toys.vocabulary("byte_level")
    of_byte = {vocabulary.token_bytes(i): i for i in range(len(vocabulary))}
    ids = [of_byte[bytes((byte,))] for byte in b"\xc2\xe6\x97\xa5"]
    logprobs = ChatLogprobs(vocabulary, 0, True)
    first = logprobs.of(Delta(0, 0, "\ufffd", (ids[0],), positions(ids[0]), texts=("\ufffd",)))
    rest = logprobs.of(Delta(0, 1, "日", tuple(ids[1:]), positions(*ids[1:]), texts=("", "", "日")))
    assert [entry["bytes"] for entry in first["content"]] == [[0xEF, 0xBF, 0xBD]]
    assert [entry["bytes"] for entry in rest["content"]] == [[0xE6], [0x97], [0xA5]]


def test_special_tokens_that_an_echo_leaves_out_take_no_room_in_it() -> None:
    begin, end = toys.ids("marked", "".join(toys.SPECIALS))
    text = toys.ids("marked", "the 🔥")
    for echo, ids, starts in (
        ("the 🔥", (begin, *text), [0, 0]),
        ("the 🔥", (begin, *text, end), [0, 0]),
        ("<|im_end|>the 🔥", (begin, end, *text), [0, 0, 10]),
        ("<|im_start|>the 🔥", (begin, begin, *text), [0, 12, 12]),
    ):
        columns = CompletionLogprobs(toys.vocabulary("marked"), 0)
        delta = Delta(0, 0, f"{echo}!", (33,), positions(33), texts=("!",))
        offsets = columns.of(delta, ids, positions(*ids))["text_offset"]
        assert offsets[: len(starts)] == starts
        assert offsets[-1] == len(echo)
        assert columns.of(Delta(0, 1, "?", (34,), positions(34), texts=("?",)))["text_offset"] == [len(echo) + 1]
