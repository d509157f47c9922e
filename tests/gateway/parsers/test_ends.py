"""How an answer with calls or reasoning ends, what its deltas are, and which tokens stand behind them."""

from __future__ import annotations

import json

import pytest

from services.gateway.parsers.formats import TOOL_FORMATS
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
    Told,
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


def told_of(text: str, options: TextOptions, finish: FinishReason, at: int) -> Told:
    """The same in one piece and in several, which are cut in many ways over all of `at`."""
    tokens = tokens_of(text, [*range(1 + at % 3, len(text) - 1, 1 + at % 5), len(text) - 1])
    told = join(stream(tokens, options, finish)[0])
    pieces = join(stream(tokens, options, finish, cuts=range(1, len(tokens.ids), 1 + at % 4))[0])
    assert pieces == told
    return told


def is_json(text: str) -> bool:
    """Whether a text is one value, whole."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_an_answer_cut_anywhere_tells_whether_its_last_call_is_whole(form: str, parallel: bool) -> None:
    """It is one of calls alone, so that the beginning of a call is no text."""
    written = (("f", '{"a": "}]\\""}'), ("f", '{"b": [{}]}'))
    text = TOOL_FORMATS[form].shape.write(written)
    options = TextOptions(tools=tools(form, parallel=parallel, forced=True))
    for at in range(1, len(text)):
        cut = told_of(text[:at], options, FinishReason.LENGTH, at)
        calls = cut.answer.calls
        closed = bool(calls) and is_json(calls[-1][1])
        assert cut.answer.content == ""
        assert cut.call_cut == (bool(calls) and not closed)
        assert [name for name, _ in calls] == [name for name, _ in written[: len(calls)]]
        assert calls[:-1] == written[: len(calls)][:-1]
        over = cut.finish == Finish(FinishReason.TOOL_CALLS)  # after the first, where there may be but one
        assert over or cut.finish == Finish(FinishReason.LENGTH)
        assert not over or (not parallel and closed)

        by_id = told_of(text[:at] + "!", options, FinishReason.STOP_ID, at)
        assert (by_id.answer.calls, by_id.answer.content, by_id.call_cut) == (calls, "", cut.call_cut)
        reason = FinishReason.TOOL_CALLS if closed else FinishReason.STOP_ID
        assert by_id.finish == Finish(reason, stop_token_id=None if over else len(by_id.ids))

        stop, include = text[at : at + 4], bool(at % 2)
        if text.find(stop) != at or len(stop) < 4:
            continue
        asked = TextOptions(stop=(stop,), include_stop=include, tools=options.tools)
        by_string = told_of(text, asked, FinishReason.LENGTH, at)
        same = told_of(text[: at + 4 if include else at], options, FinishReason.LENGTH, at)
        assert (by_string.answer, by_string.call_cut) == (same.answer, same.call_cut)
        if same.finish == Finish(FinishReason.TOOL_CALLS):
            assert by_string.finish == same.finish
        else:
            whole = bool(same.answer.calls) and not same.call_cut
            reason = FinishReason.TOOL_CALLS if whole else FinishReason.STOP_STRING
            assert by_string.finish == Finish(reason, stop_string=stop)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_"),
        ("hermes", '<tool_call>\n{"na'),
        ("hermes", '<tool_call>\n{"arguments": {"a": 1}, "name": "'),
        ("llama3", '{"name": "f'),
        ("mistral", "[TOOL_CALLS][{"),
        ("mistral_named", "[TOOL_CALLS]get_w"),
        ("hermes", "<thi"),
        ("llama3", "\n<think"),
    ],
)
def test_what_may_begin_a_call_is_text_only_where_text_may_come(form: str, text: str, forced: bool) -> None:
    options = TextOptions(reasoning=THINK, tools=tools(form, forced=forced))
    for finish in (FinishReason.LENGTH, FinishReason.STOP_ID, FinishReason.ABORT):
        ends = finish is FinishReason.STOP_ID
        told = told_of(text + "!" * ends, options, finish, 0)
        assert told.answer == Answer("" if forced else text)
        assert told.ids == tuple(range(1, len(told.ids) + 1))
        assert "".join(told.texts) == told.answer.content
        assert told.finish == Finish(finish, stop_token_id=told.ids[-1] if ends else None)
        assert not told.call_cut


def test_reasoning_before_a_forced_call_is_told_where_it_is_cut() -> None:
    options = TextOptions(reasoning=THINK, tools=tools("hermes", forced=True))
    told = told_of("<think>let me see</thi", options, FinishReason.LENGTH, 1)
    assert told.answer == Answer("", reasoning="let me see</thi")


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ('<tool_call>{"name": "f"', True),
        ('<tool_call>{"name": "f"}', False),
        ('<tool_call>{"name": "f", "arguments": ', True),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', False),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>', True),
        ('<tool_call>{"name": "f", "arguments": "{}"', False),
        ('<tool_call>{"name": "f", "arguments": "{}', True),
        ('<tool_call>{"name": "f", "arguments": ""', True),
        ('<tool_call>{"name": "f", "arguments": null', True),
        ('<tool_call>{"name": "f", "arguments": null}', False),
        ('<tool_call>{"arguments": {}, "name": "f"', False),
        ('<tool_call>{"arguments": {}, "name": "f', False),
        (f'{CALL}<tool_call>{{"name": "f"', True),
        (f"{CALL}and on", False),
        ("so", False),
    ],
)
def test_a_call_is_whole_once_its_arguments_are(text: str, cut: bool) -> None:
    options = TextOptions(stop=("STOP",), tools=tools("hermes"))
    told = told_of(f"{text}STOP", options, FinishReason.LENGTH, 1)
    assert told.call_cut == cut
    whole = bool(told.answer.calls) and not cut
    assert told.finish == Finish(FinishReason.TOOL_CALLS if whole else FinishReason.STOP_STRING, stop_string="STOP")
    assert told_of(text, options, FinishReason.EOS, 1).call_cut == cut


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
