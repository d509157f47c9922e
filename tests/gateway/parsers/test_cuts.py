"""However a text is cut into tokens, and tokens into pieces, a client has the same in the end, and it is right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import SupportsIndex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.constraints.combining import combine
from services.gateway.constraints.parts import Calls, Surroundings
from services.gateway.parsers.formats import TOOL_FORMATS
from services.gateway.request import Finish, FinishReason, ReasoningOptions, TextOptions, TokenLogprob
from services.gateway.tools import Tool, ToolChoice
from tests.gateway.constraints.walks import matcher, walk
from tests.gateway.parsers.answers import (
    EOS,
    NAMES,
    THINK,
    THINKING,
    Answer,
    Tokens,
    Told,
    join,
    parse,
    stream,
    tokens_of,
    tools,
)
from tests.lines import lines_in

WORDS = st.text('ab <{}[]"/:,\\🔥é\n', max_size=12)
VALUES = st.recursive(
    st.text('ab<{}[]"\\/🔥é\n', max_size=6) | st.integers(-9, 999) | st.none(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=4,
)


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, str, ReasoningOptions | None, Answer]:
    """A format, a text that keeps to it, how it reasons, and what the text says."""
    form = draw(st.sampled_from(sorted(TOOL_FORMATS)))
    reasoning = draw(st.none() | st.tuples(WORDS, st.booleans(), st.booleans()))
    content = draw(WORDS).rstrip()
    calls = draw(
        st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(st.sampled_from("abc"), VALUES)), max_size=3)
    )
    written = tuple((name, json.dumps(arguments, ensure_ascii=draw(st.booleans()))) for name, arguments in calls)
    after = draw(WORDS).strip() if calls else ""
    if form == "llama3":  # bare objects stand at the beginning, and text after them begins with no separator
        content = "" if calls else content.lstrip("{ \n")
        after = after.lstrip(";{ \n")
    if form.startswith("mistral"):
        content, after = content.rstrip("[ \n"), after.lstrip("[ \n")
    space = draw(st.sampled_from(["", "\n", " \n\n"]))
    calls_text = TOOL_FORMATS[form].shape.write(written) if written else ""
    text = f"{content}{space if written else ''}{calls_text}{space if after else ''}{after}"
    options = None
    shown = ""
    if reasoning is not None:
        thought, inside, visible = reasoning
        content, text = content.lstrip(), text.lstrip()
        options = ReasoningOptions("<think>", "</think>", inside, visible)
        text = f"{'' if inside else '<think>'}{thought}</think>{space}{text}"
        shown = thought if visible else ""
    return form, text, options, Answer(content + after, written, shown)


def check_cuts(data: st.DataObject, tokens: Tokens, options: TextOptions, finish: FinishReason) -> Told:
    """What deltas say, joined: the same whole and in random pieces. Ids, texts and logprobs are those of the tokens."""
    count = len(tokens.ids)
    min_tokens = data.draw(st.integers(0, 4))
    whole, pipeline = stream(tokens, options, finish, min_tokens=min_tokens)
    assert len(whole) == 1
    told = join(whole)
    deltas, pieced = stream(
        tokens,
        options,
        finish,
        cuts=data.draw(st.lists(st.integers(0, count - (finish is FinishReason.STOP_ID)), max_size=8)),
        takes=data.draw(st.lists(st.booleans(), max_size=8)),
        min_tokens=min_tokens,
        needs_tokens=data.draw(st.booleans()),
    )
    assert join(deltas) == told
    assert pieced.kept_tokens == pipeline.kept_tokens == len(told.ids)
    every, _ = stream(tokens, options, finish, cuts=range(1, count), min_tokens=min_tokens, needs_tokens=True)
    assert join(every) == told
    assert "".join(told.texts) == told.answer.content
    ids = (*tokens.ids, EOS)
    assert told.ids == ids[: len(told.ids)]
    assert told.logprobs == tuple((TokenLogprob(ids[at], -float(at), 1),) for at in range(len(told.ids)))
    return told


def some_tokens(data: st.DataObject, text: str, marks: tuple[str, ...] = ()) -> Tokens:
    """The text in tokens of random sizes, which may end within a character."""
    size = len(text.encode())
    if data.draw(st.booleans()):
        return tokens_of(text, data.draw(st.lists(st.integers(0, size), max_size=12)), marks)
    step = data.draw(st.integers(1, 5))
    return tokens_of(text, range(0, size, step), marks)


def check_answer(data: st.DataObject) -> None:
    form, text, reasoning, answer = data.draw(answers())
    finish = data.draw(st.sampled_from([FinishReason.EOS, FinishReason.LENGTH]))
    tokens = some_tokens(data, text)
    told = check_cuts(data, tokens, TextOptions(reasoning=reasoning, tools=tools(form)), finish)
    assert told.answer == answer
    wanted = FinishReason.TOOL_CALLS if answer.calls and finish is FinishReason.EOS else finish
    assert told.finish == Finish(wanted)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_written_is_told(data: st.DataObject) -> None:
    check_answer(data)


@pytest.mark.slow
@settings(max_examples=4_000, deadline=None)
@given(data=st.data())
def test_what_is_written_is_told_at_length(data: st.DataObject) -> None:
    check_answer(data)


PIECES = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>"),
    *('{"name": "f"', '"name"', ": ", ", ", '"arguments": ', '"parameters"', '"f"', '"get_weather"', "f"),
    *("{", "}", "[", "]", '"', "\\", "\\ud83d", "\\u00", ";", "<", "</", "n", "1", " ", "\n", "🔥", "é", "so "),
)
MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>")


def check_anything(data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=24)))
    marks = MARKS if data.draw(st.booleans()) else ()
    tokens = some_tokens(data, text, marks)
    options = TextOptions(
        stop=tuple(data.draw(st.lists(st.sampled_from(PIECES), max_size=2))),
        include_stop=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
        kept_ids=tokens.special,
        reasoning=data.draw(st.sampled_from([None, THINK, ReasoningOptions("<think>", "</think>", inside=True)])),
        tools=data.draw(
            st.none()
            | st.builds(tools, st.sampled_from(sorted(TOOL_FORMATS)), parallel=st.booleans(), forced=st.booleans()),
        ),
    )
    finish = data.draw(st.sampled_from([FinishReason.EOS, FinishReason.LENGTH, FinishReason.STOP_ID]))
    told = check_cuts(data, tokens, options, finish)
    assert told.finish is not None
    stopped = told.finish.stop_string is not None or told.finish.stop_token_id is not None
    if stopped:  # by the client, and a call that it cut is not whole
        whole = bool(told.answer.calls) and not told.call_cut
        assert (told.finish.reason is FinishReason.TOOL_CALLS) == whole
    assert told.answer.calls or not told.call_cut
    if options.skip_special_tokens and marks:
        shown = (told.answer.content, told.answer.reasoning, *(arguments for _, arguments in told.answer.calls))
        assert not any(mark in text for mark in marks for text in shown), "special tokens are left out"


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_anything_at_all_is_told_the_same_for_every_cut(data: st.DataObject) -> None:
    check_anything(data)


@pytest.mark.slow
@settings(max_examples=4_000, deadline=None)
@given(data=st.data())
def test_anything_at_all_is_told_the_same_for_every_cut_at_length(data: st.DataObject) -> None:
    check_anything(data)


@settings(max_examples=60, deadline=None)
@given(answers(), st.data())
def test_what_is_told_early_stays(whole: tuple[str, str, ReasoningOptions | None, Answer], data: st.DataObject) -> None:
    """Whatever follows: each thing told is the beginning of what is told in the end."""
    form, text, reasoning, answer = whole
    told = parse([text[: data.draw(st.integers(0, len(text)))]], form, reasoning, whole=False)
    assert answer.content.startswith(told.content)
    assert answer.reasoning.startswith(told.reasoning)
    assert [name for name, _ in told.calls] == [name for name, _ in answer.calls[: len(told.calls)]]
    for (_, arguments), (_, wanted) in zip(told.calls, answer.calls, strict=False):
        assert wanted.startswith(arguments)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
def test_what_a_grammar_makes_a_model_write_is_calls_wherever_it_is_cut(form: str, parallel: bool) -> None:
    """No content, and a last call that is whole or said to be cut."""
    draw = random.Random(form)
    offered = [Tool(name) for name in NAMES]
    calls = Calls(offered, ToolChoice("required"), TOOL_FORMATS[form].shape, parallel=parallel)
    for reasoning in (None, THINK, THINKING):
        constraint = combine(None, calls, Surroundings(reasoning))
        assert constraint is not None
        text = (walk(matcher(constraint), draw, [b"</think>", b'"}', b"get_"]) or b"").decode(errors="replace")
        options = TextOptions(reasoning=reasoning, tools=tools(form, parallel=parallel, forced=True))
        for end in (len(text), *draw.choices(range(1, len(text)), k=25)):
            tokens = tokens_of(text[:end], range(0, end, draw.randint(1, 6)))
            told = join(stream(tokens, options, FinishReason.LENGTH)[0])
            assert told.answer.content == ""
            assert end < len(text) or told.answer.calls
            if told.answer.calls and not told.call_cut:
                json.loads(told.answer.calls[-1][1])


LONG: dict[str, tuple[str, Callable[[int], str]]] = {
    "text": ("hermes", lambda n: "so < it is\n" * n),
    "spaces": ("hermes", lambda n: " " * (11 * n)),
    "false starts": ("hermes", lambda n: "<tool_cal" * n),
    "one call": ("hermes", lambda n: '<tool_call>{"name": "f", "arguments": {"a": "' + "word \\n " * n + '"}}'),
    "arguments first": ("hermes", lambda n: '<tool_call>{"arguments": {"a": "' + "word " * n + '"}, "name": "f"}'),
    "nested": ("hermes", lambda n: '<tool_call>{"name": "f", "arguments": ' + '{"a":[' * n + "]}" * n),
    "never a name": ("llama3", lambda n: '{"arguments": [' + "1, " * n),
    "many calls": ("llama3", lambda n: '{"name": "f"}; ' * n),
    "reasoning": ("hermes", lambda n: "<think>" + "hm </thin " * n + "</think>so"),
    "broken": ("hermes", lambda n: '<tool_call>{"name": "f"}}}}' * n),
}


class Counted(str):
    """A text that counts the characters that are copied out of it."""

    copied = 0

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        part = super().__getitem__(key)
        Counted.copied += len(part)
        return Counted(part)


@pytest.mark.parametrize("kind", LONG)
def test_time_is_linear_in_the_length(kind: str) -> None:
    """Twice the text runs twice the lines and copies no character more often, in one piece or in many."""
    form, write = LONG[kind]

    def cost(repeats: int, size: int) -> tuple[int, float]:
        text = write(repeats)
        pieces = [Counted(text[at : at + size]) for at in range(0, len(text), size)]
        Counted.copied = 0
        return lines_in(lambda: parse(pieces, form, THINK))[1], Counted.copied / len(text)

    for size in (1, 7, 1_000_000):
        (short, some), (long, more) = cost(60, size), cost(120, size)
        assert long <= 2.1 * short + 200
        assert more <= some + 0.5
