"""How an answer with calls or reasoning ends, what its deltas are, and which tokens stand behind them."""

from __future__ import annotations

import pytest

from services.gateway.pipeline import ChoicePipeline
from services.gateway.request import (
    ChoiceTokens,
    Finish,
    FinishReason,
    TextOptions,
    ToolOptions,
)
from tests.gateway.parsers.answers import (
    EOS,
    NAMES,
    THINK,
    THINKING,
    Answer,
    join,
    stream,
    tokens_of,
    tools,
)

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CALLED = ("f", '{"a": 1}')
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


@pytest.mark.parametrize("step", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize(
    ("text", "finish", "answer", "ended"),
    [
        (CALL, FinishReason.EOS, Answer("", (CALLED,)), FinishReason.TOOL_CALLS),
        (CALL, FinishReason.LENGTH, Answer("", (CALLED,)), FinishReason.LENGTH),
        (CALL, FinishReason.ABORT, Answer("", (CALLED,)), FinishReason.ABORT),
        (CALL[:-15], FinishReason.EOS, Answer("", (("f", '{"a": 1'),)), FinishReason.TOOL_CALLS),
        (CALL[:20], FinishReason.EOS, Answer(CALL[:20]), FinishReason.EOS),
        (CALL[:20], FinishReason.LENGTH, Answer(CALL[:20]), FinishReason.LENGTH),
        ("Only words.", FinishReason.EOS, Answer("Only words."), FinishReason.EOS),
        ("Only words.", FinishReason.LENGTH, Answer("Only words."), FinishReason.LENGTH),
    ],
)
def test_calls_are_the_reason_where_there_are_some_and_the_answer_is_whole(
    text: str, finish: FinishReason, answer: Answer, ended: FinishReason, step: int
) -> None:
    tokens = tokens_of(text, range(0, len(text), step))
    for cuts in ((), range(1, len(tokens.ids))):
        deltas, _ = stream(tokens, TextOptions(tools=tools("hermes")), finish, cuts=cuts)
        told = join(deltas)
        assert told.answer == answer
        assert told.finish == Finish(ended)


def test_without_tools_a_call_is_text() -> None:
    deltas, _ = stream(tokens_of(CALL), TextOptions(), FinishReason.EOS)
    assert join(deltas).answer == Answer(CALL)
    deltas, _ = stream(tokens_of(CALL), TextOptions(reasoning=THINK), FinishReason.EOS)
    assert join(deltas).answer == Answer(CALL)
    assert join(deltas).finish == Finish(FinishReason.EOS)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_after_a_call(include: bool) -> None:
    options = TextOptions(stop=("STOP",), include_stop=include, tools=tools("hermes"))
    deltas, pipeline = stream(tokens_of(f"{CALL}\nSTOP{CALL}", [len(CALL) + 5]), options)
    told = join(deltas)
    assert told.answer == Answer("STOP" if include else "", (CALLED,))
    assert told.finish == Finish(FinishReason.TOOL_CALLS, stop_string="STOP")
    assert told.ids == (1,)
    assert pipeline.kept_tokens == 1


def test_a_stop_string_in_arguments_ends_them() -> None:
    options = TextOptions(stop=("1}",), tools=tools("hermes"))
    deltas, _ = stream(tokens_of(CALL, range(len(CALL))), options)
    assert join(deltas).answer == Answer("", (("f", '{"a": '),))
    assert join(deltas).finish == Finish(FinishReason.STOP_STRING, stop_string="1}")
    assert join(deltas).call_cut


def test_a_stop_string_in_reasoning_ends_the_answer() -> None:
    deltas, _ = stream(tokens_of("let me see</think>so"), TextOptions(stop=("me",), reasoning=THINKING))
    assert join(deltas).answer == Answer("", reasoning="let ")
    assert join(deltas).finish == Finish(FinishReason.STOP_STRING, stop_string="me")


def test_a_stop_id_after_a_call_is_named() -> None:
    tokens = tokens_of(CALL + "!", [len(CALL)])
    deltas, _ = stream(tokens, TextOptions(tools=tools("hermes")), FinishReason.STOP_ID)
    assert join(deltas).answer == Answer("", (CALLED,))
    assert join(deltas).finish == Finish(FinishReason.TOOL_CALLS, stop_token_id=tokens.ids[-1])


@pytest.mark.parametrize("step", [1, 3, 7, 1000])
@pytest.mark.parametrize("finish", [FinishReason.EOS, FinishReason.LENGTH])
def test_one_call_is_all_where_they_may_not_be_parallel(step: int, finish: FinishReason) -> None:
    text = f"So.\n{CALL}\n{CALL}\n{CALL}"
    end = text.index("}}") + 2
    tokens = tokens_of(text, range(0, len(text), step))
    kept = min(-(-end // step), len(tokens.ids))
    for cuts in ((), range(1, len(tokens.ids))):
        deltas, pipeline = stream(
            tokens, TextOptions(tools=tools("hermes", parallel=False)), finish, cuts=cuts, needs_tokens=True
        )
        told = join(deltas)
        assert told.answer == Answer("So.", (CALLED,))
        assert told.finish == Finish(FinishReason.TOOL_CALLS), "it has ended before the length"
        assert told.ids == tokens.ids[:kept]
        assert pipeline.kept_tokens == kept
    pipeline.push(ChoiceTokens(0, kept, (5, 6), FinishReason.LENGTH))
    assert pipeline.kept_tokens == kept


def test_a_token_that_waited_for_its_last_character_may_end_the_answer() -> None:
    """The one that brought the rest of the character does not count."""
    text = '<tool_call>{"name": "f"}🔥'
    tokens = tokens_of(text, [len(text)])  # after the first byte of the last character
    assert len(tokens.ids) == 2
    deltas, pipeline = stream(tokens, TextOptions(tools=tools("hermes", parallel=False)), cuts=[1])
    assert join(deltas).answer == Answer("", (("f", "{}"),))
    assert join(deltas).ids == tokens.ids[:1]
    assert pipeline.kept_tokens == 1


def test_one_call_ends_the_answer_before_a_stop_string_behind_it() -> None:
    options = TextOptions(stop=("</tool_call>",), tools=tools("hermes", parallel=False))
    deltas, _ = stream(tokens_of(CALL, range(len(CALL))), options)
    assert join(deltas).finish == Finish(FinishReason.TOOL_CALLS)
    assert join(deltas).answer == Answer("", (CALLED,))


def test_each_call_begins_in_one_delta_and_goes_on_in_others() -> None:
    tokens = tokens_of(f"{CALL}\n{CALL}", range(0, 2 * len(CALL), 3))
    deltas, _ = stream(tokens, TextOptions(tools=tools("hermes")), FinishReason.EOS, cuts=range(1, len(tokens.ids)))
    pieces = [call for delta in deltas for call in delta.tool_calls]
    assert [piece.index for piece in pieces] == sorted(piece.index for piece in pieces)
    begun = [piece for piece in pieces if piece.id is not None]
    assert [(piece.index, piece.name) for piece in begun] == [(0, "f"), (1, "f")]
    assert begun[0].id != begun[1].id
    assert all(piece.arguments for piece in pieces if piece.id is None)
    assert len(pieces) > 4, "arguments come while they are written"


def test_two_calls_in_one_delta() -> None:
    (delta,), _ = stream(tokens_of(f"{CALL}{CALL}"), TextOptions(tools=tools("hermes")), FinishReason.EOS)
    assert [(call.index, call.name, call.arguments) for call in delta.tool_calls] == [(0, *CALLED), (1, *CALLED)]


def test_ids_are_told_with_what_they_say() -> None:
    """A token waits until its text is decided; then its text, id and log probability come at once."""
    tokens = tokens_of("Hi\n<tool_<tool_call>", [2, 3, 5, 9, 14])  # "Hi" "\n" "<t" "ool_" "<tool" "_call>"
    deltas, _ = stream(tokens, TextOptions(tools=tools("hermes")), FinishReason.LENGTH, cuts=range(1, 6))
    assert [(delta.text, delta.token_ids) for delta in deltas] == [
        ("Hi", (1,)),
        ("\n<tool_", (2, 3, 4)),
        ("<tool_call>", (5, 6)),
    ]
    assert [delta.texts for delta in deltas] == [("Hi",), ("\n", "<t", "ool_"), ("<tool", "_call>")]
    assert [len(delta.logprobs) for delta in deltas] == [1, 3, 2]


def test_several_tokens_at_the_end_of_reasoning_lose_nothing() -> None:
    text = "weighing it one more time</think>\n\nAnswer."
    whole = Answer("Answer.", reasoning="weighing it one more time")
    for step in range(1, 8):
        tokens = tokens_of(text, range(0, len(text), step))
        for size in range(1, 8):
            deltas, _ = stream(
                tokens, TextOptions(reasoning=THINKING), FinishReason.EOS, cuts=range(size, len(tokens.ids), size)
            )
            told = join(deltas)
            assert told.answer == whole
            assert told.ids == (*tokens.ids, EOS)


def test_the_tokens_of_reasoning_are_counted() -> None:
    tokens = tokens_of("<think>a b</think>\n\nSo", [7, 8, 10, 18, 20])  # <think> "a" " b" </think> "\n\n" "So"
    for shown in (True, False):
        reasoning = THINK if shown else type(THINK)(THINK.open, THINK.close, inside=False, shown=False)
        deltas, _ = stream(tokens, TextOptions(reasoning=reasoning), FinishReason.EOS, cuts=range(1, 6))
        told = join(deltas)
        assert told.answer == Answer("So", reasoning="a b" if shown else "")
        assert told.reasoning_tokens == 5
        assert told.texts == ("", "", "", "", "", "So", "")
    deltas, _ = stream(tokens_of("So <think>", [2]), TextOptions(reasoning=THINK), FinishReason.EOS)
    assert join(deltas).reasoning_tokens == 0


def test_a_token_without_text_at_the_beginning_is_reasoning_if_reasoning_follows() -> None:
    for text, count in (("<x>So", 0), ("<x><think>a</think>So", 2)):
        tokens = tokens_of(text, [len(text) - 5], marks=("<x>",))
        deltas, _ = stream(tokens, TextOptions(reasoning=THINK), needs_tokens=True, cuts=range(1, len(tokens.ids)))
        assert join(deltas).answer.content == "So"
        assert join(deltas).reasoning_tokens == count


def test_no_delta_says_nothing_while_a_token_waits() -> None:
    tokens = tokens_of("<x><tool", marks=("<x>",))
    pipeline = ChoicePipeline(0, tokens.vocabulary, TextOptions(tools=tools("hermes")), needs_tokens=True)
    pipeline.push(ChoiceTokens(0, 0, tokens.ids))
    assert pipeline.take() is None
    pipeline.push(ChoiceTokens(0, 2, (), FinishReason.LENGTH))
    delta = pipeline.take()
    assert delta is not None
    assert (delta.text, delta.token_ids) == ("<tool", tokens.ids)


# Marks that are special tokens


@pytest.mark.parametrize("skip", [True, False])
def test_special_marks_are_seen_though_special_tokens_are_left_out(skip: bool) -> None:
    tokens = tokens_of(f"<think>hm</think>Look. {CALL}", marks=MARKS)
    assert len(tokens.special) == 5
    options = TextOptions(skip_special_tokens=skip, kept_ids=tokens.special[1:], reasoning=THINK, tools=tools("hermes"))
    deltas, _ = stream(tokens, options, FinishReason.EOS, cuts=range(1, len(tokens.ids)))
    assert join(deltas).answer == Answer("Look.", (CALLED,), "hm")


@pytest.mark.parametrize(("skip", "shown"), [(True, "no call: \n"), (False, "no call: <tool_call>\n</tool_call>")])
def test_a_mark_that_turns_out_to_be_text_is_treated_as_other_special_tokens(skip: bool, shown: str) -> None:
    tokens = tokens_of("no call: <tool_call>\n</tool_call>", marks=MARKS)
    options = TextOptions(skip_special_tokens=skip, kept_ids=tokens.special[1:], tools=tools("hermes"))
    deltas, _ = stream(tokens, options, FinishReason.EOS)
    assert join(deltas).answer == Answer(shown)
    assert "".join(join(deltas).texts) == shown


def test_a_mark_that_is_not_kept_is_not_seen() -> None:
    tokens = tokens_of(CALL, marks=MARKS)
    deltas, _ = stream(tokens, TextOptions(tools=tools("hermes")), FinishReason.EOS)
    assert join(deltas).answer == Answer('\n{"name": "f", "arguments": {"a": 1}}\n')


def test_a_mark_in_arguments_is_left_out_of_them() -> None:
    text = '[TOOL_CALLS]f[ARGS]{"a": "x[ARGS]y"}[TOOL_CALLS]f[ARGS]{"b": [TOOL_CALLS]f[ARGS]{}'
    tokens = tokens_of(text, marks=("[TOOL_CALLS]", "[ARGS]"))
    options = TextOptions(kept_ids=tokens.special[1:], tools=ToolOptions("mistral_named", NAMES))
    deltas, _ = stream(tokens, options, FinishReason.EOS, cuts=range(1, len(tokens.ids)))
    assert join(deltas).answer == Answer("", (("f", '{"a": "xy"}'), ("f", '{"b": '), ("f", "{}")))


def test_a_stop_string_does_not_see_special_marks() -> None:
    """It is looked for in what special tokens left out of a text leave of it."""
    tokens = tokens_of(CALL, marks=MARKS)
    options = TextOptions(stop=("<tool_call>",), kept_ids=tokens.special[1:], tools=tools("hermes"))
    deltas, _ = stream(tokens, options, FinishReason.EOS)
    assert join(deltas).answer == Answer("", (CALLED,))


def test_plain_requests_have_no_parser() -> None:
    tokens = tokens_of("<think>a</think><tool_call>")
    pipeline = ChoicePipeline(0, tokens.vocabulary, TextOptions(kept_ids=(1,)))
    pipeline.push(ChoiceTokens(0, 0, tokens.ids))
    delta = pipeline.take()
    assert delta is not None
    assert (delta.text, delta.reasoning, delta.tool_calls) == ("<think>a</think><tool_call>", "", ())
