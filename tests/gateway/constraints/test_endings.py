"""Lark grammars that no output gets to the end of are refused by what goes round; all others are not."""

from __future__ import annotations

import random

import pytest

from services.common.errors import InvalidArgument
from services.gateway.constraints.endings import endless
from services.gateway.constraints.lark import client_grammar
from services.gateway.constraints.trial import complaint
from services.gateway.request import Constraint
from tests.lines import lines_in

ENDLESS = [
    ('start: "a" start', "start → start"),
    ("start: start", "start → start"),
    ('start: a "b"\na: "x" a | a "y"', "start → a → a"),
    ('start: a\na: b "z"\nb: c | "q" b\nc: "(" a ")"', "start → a → b → c → a"),
    ('start: "x" | "a" b\nb: "b" b', "b → b"),
    ('start: "x" b*\nb: "y" b', "b → b"),
    ('start: "x" b?\nb: ("y" | "z") (b | "q" b)', "b → b"),
    ('start: "x" [b]\nb: "y" b+', "b → b"),
    ('start: "x" b~0..2\nb: "y" b~1..3', "b → b"),
    ('start: "x" b{,2}\nb: "y" b{2}', "b → b"),
    ('?start: list // start: "x"\nlist: item "," list\nitem: /[0-9]/', "start → list → list"),
    ('start: "start: \\"x\\"" start -> x', "start → start"),
    ('start: %json {"const": "| x"} start', "start → start"),
    ("start: <[9]> start", "start → start"),
    ('start: "a" a\na[lazy]: "b" a\n%ignore / /\n%import common.INT', "start → a → a"),
]


@pytest.mark.parametrize(("grammar", "circle"), ENDLESS)
def test_what_never_ends_is_refused_by_its_rule(grammar: str, circle: str) -> None:
    rule = circle.split(" ", 1)[0]
    with pytest.raises(InvalidArgument) as refused:
        client_grammar(grammar, "g")
    assert refused.value.field == "g"
    assert refused.value.message == f"g: no output of the rule {rule} can end: {circle}"


@pytest.mark.parametrize("grammar", [r'start: "a" /[^\s\S]/', "start: x\nx: A\nA: /x[^\\W\\w]y/"])
def test_an_expression_that_matches_nothing_is_no_end(grammar: str) -> None:
    with pytest.raises(InvalidArgument, match="matches nothing"):
        client_grammar(grammar, "g")


LEGITIMATE = [
    'start: "a" start | "b"',
    'start: "a" start?',
    'start: "a" start*',
    'start: start "a" | ',
    'start: ("x" start)~0..3 "a"',
    'start: "(" [start] ")"',
    'start: "a" | (start)+ "b"',
    'start: expr\nexpr: term | expr "+" term\nterm: NUMBER | "(" expr ")"\nNUMBER: /[0-9]+/',
    'start: value\nvalue: object | array | /[0-9]+/\nobject: "{" [pair ("," pair)*] "}"\n'
    'pair: /"[a-z]+"/ ":" value\narray: "[" [value ("," value)*] "]"',
    "?start: a\n!a: b -> start\n?b: /x/i",
    "%import common.INT\n%import common (WS, NUMBER)\n%ignore WS\nstart: INT | NUMBER",
    'start: %json {"type": "object", "properties": {"start": {"$ref": "#"}}} "x"',
    'start: a\na[capture="x", lazy]: /(?s:.*)end/',
    "start: <[257]> start | <[256]>",
    'start: A\nA: B & ~"bb"\nB: /b+/',
    'start: "x" // start\n  | "y" start  # | start\n',
    'start: "start: start" | /start: start/',
    r'start: "x" | /[^\s\S]/',
    r"start: /x[^\s\S]*y|[^\d\D]?/ /[^\s\S]{0,2}/",
    'start: "a".."c" start | "."\n',
    'start: even | odd\neven: "" | "a" odd\nodd: "a" even',
    'start: _list{1,2}\n_list: "-" _list | "\\n"',
]


@pytest.mark.parametrize("grammar", LEGITIMATE)
def test_what_may_end_is_taken(grammar: str) -> None:
    assert complaint(Constraint("lark", client_grammar(grammar, "g"))) is None


def test_rules_with_parameters_are_left_to_the_library() -> None:
    assert endless('start: a::3\na::_: "x" a::decr(0)') is None
    assert endless("a: a") is None
    assert endless("start: a)) | (") is None
    assert endless("") is None


@pytest.mark.parametrize("seed", range(40))
def test_it_says_what_trying_all_ways_says(seed: int) -> None:
    draw = random.Random(seed)
    names = ["start", "b", "c", "d", "e"]
    rules = {
        name: [
            [draw.choice([*names, '""', '""']) for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(1, 2))
        ]
        for name in names
    }
    ending: set[str] = {'""'}
    for _ in names:
        ending |= {name for name, ways in rules.items() if any(set(way) <= ending for way in ways)}
    reached = {"start"}
    for _ in names:
        reached |= {other for name in reached & rules.keys() for way in rules[name] for other in way}
    text = "\n".join(f"{name}: {' | '.join(' '.join(way) for way in ways)}" for name, ways in rules.items())
    assert (endless(text) is None) == (reached <= ending), text


def test_looking_at_a_grammar_costs_as_much_as_it_is_long() -> None:
    def chain(length: int) -> str:
        rules = [f"r{at}: r{at + 1} r{at + 2} | (r{at + 1} | r{at})" for at in range(length)]
        return "\n".join(["start: r0", *rules, f'r{length}: ""', f'r{length + 1}: ""'])

    def nest(depth: int) -> str:
        return "start: " + "(" * depth + "start" + ")" * depth

    assert endless(chain(490)) is None
    assert endless(nest(15_000)) is not None
    for long, double in ((chain(40), chain(80)), (nest(300), nest(600))):
        assert lines_in(lambda text=double: endless(text))[1] < 2.2 * lines_in(lambda text=long: endless(text))[1]
