"""One grammar of all that an answer may be.

    [ reasoning ] { text by the client's constraint | calls of tools whose arguments follow their schemas }

Where only an answer is wanted, it stays of its own kind, which costs least.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from services.gateway.constraints.lark import SPACE, expression, literal, up_to, without
from services.gateway.constraints.parts import Calls, Surroundings, Wanted, refuse
from services.gateway.constraints.schemas.normal import normal_text
from services.gateway.request import Constraint
from services.gateway.tools import Tool


def combine(wanted: Wanted | None, calls: Calls | None, around: Surroundings) -> Constraint | None:
    """What the output must follow; None where it is free. Raises InvalidArgument for what cannot be held at once."""
    if calls is not None and not calls.tools:
        calls = None
    if calls is not None and calls.choice.mode == "none":
        calls = None
    if calls is None or (wanted is None and not calls.hold):
        return None if wanted is None else _answer(wanted, around)
    if calls.choice.forced:  # a format is one of text, of which there is none
        return _composed(["start: body", *_calls(replace(calls, held=True), around, "body")], around)
    if wanted is None:
        return _composed(_free_or_calls(calls, around), around)
    return _composed(_answer_or_calls(wanted, replace(calls, held=True), around), around)


def _answer(wanted: Wanted, around: Surroundings) -> Constraint:
    """Only an answer."""
    reasoning = around.reasoning
    if reasoning is None:
        return Constraint(wanted.kind, wanted.text)
    if wanted.kind == "lark":  # a grammar of its own, which has no place in another
        close = around.added_id(reasoning.close)
        return Constraint("lark", wanted.text, (close,) if reasoning.inside and close is not None else ())
    return _composed(["start: body", f"body: {_body(wanted)}"], around)


def _body(wanted: Wanted) -> str:
    match wanted.kind:
        case "json_schema":
            return f"%json {wanted.text}"
        case "json_object":
            return f"%json {normal_text({'type': 'object'}, wanted.field)}"
        case "regex":
            return expression(wanted.text)
    raise refuse(wanted.field, "a grammar cannot be combined with calls of tools; set tool_choice to none")


def _composed(rules: list[str], around: Surroundings) -> Constraint:
    """Reasoning before a grammar whose first rule is its start."""
    reasoning = around.reasoning
    if reasoning is None:
        return Constraint("lark", "\n".join(rules))
    start = rules[0].removeprefix("start: ")
    opened = f"space {literal(reasoning.open, around.special_ids)} thought space"
    before = "thought space" if reasoning.inside else f"({opened})?"
    thought = up_to("thought", reasoning.close, around.special_ids)
    return Constraint("lark", "\n".join([f"start: {before} ({start})", *rules[1:], *thought, f"space: {SPACE}"]))


def _free_or_calls(calls: Calls, around: Surroundings) -> list[str]:
    """Any text in which no call begins, and then calls."""
    shape = calls.shape
    begins = shape.opening + shape.before_name
    mark = next((mark for mark in calls.marks if begins.startswith(mark)), None)
    if mark is None:  # unmarked calls are the whole answer
        return ["start: TEXT? | calls", r"TEXT: /(?s:.+)/ & ~/\s*\{(?s:.*)/", *_calls(calls, around, "calls")]
    text = f"TEXT: {without([mark])}"
    return [
        "start: TEXT? | told calls",
        text,
        *up_to("told", mark, around.special_ids),
        *_calls(calls, around, "calls", mark),
    ]


def _answer_or_calls(wanted: Wanted, calls: Calls, around: Surroundings) -> list[str]:
    shape = calls.shape
    if not shape.opening and shape.before_name.startswith("{"):
        return [f"start: {_answer_or_object(wanted, calls)}"]
    return ["start: body | calls", f"body: {_body(wanted)}", *_calls(calls, around, "calls")]


def _answer_or_object(wanted: Wanted, calls: Calls) -> str:
    """Where a call is a bare JSON object, one schema of both: two grammars cannot begin alike."""
    if wanted.kind not in ("json_schema", "json_object"):
        raise refuse(wanted.field, "cannot be told from this model's calls of tools; set tool_choice to none")
    key = calls.shape.before_arguments.split('"')[-2]
    answer = json.loads(_body(wanted).removeprefix("%json "))
    space, definitions = answer.pop("x-guidance"), answer.pop("$defs", {})
    options = [answer]
    for at, tool in enumerate(calls.tools):
        arguments = json.loads(_arguments(tool, calls, f"{at}."))
        del arguments["x-guidance"]
        definitions |= arguments.pop("$defs", {})
        call = {"type": "object", "properties": {"name": {"enum": [tool.name]}, key: arguments}}
        options.append({**call, "required": ["name", key], "additionalProperties": False})
    return "%json " + json.dumps({"x-guidance": space, "anyOf": options, "$defs": definitions}, ensure_ascii=False)


def _calls(calls: Calls, around: Surroundings, name: str, said: str = "") -> list[str]:
    """The rules of calls, one or more, of which `said` is there already."""
    shape, special = calls.shape, around.special_ids
    more = f" ({literal(shape.between + shape.before_name, special)} call)*" if calls.parallel else ""
    ways, rules = [], []
    for at, tool in enumerate(calls.offered):
        ways.append(f"{literal(tool.name + shape.before_arguments, special)} arguments_{at}")
        rules.append(f"arguments_{at}: %json {_arguments(tool, calls)}")
    first = literal((shape.opening + shape.before_name).removeprefix(said), special)
    last, after = literal(shape.closing, special), literal(shape.after_call, special)
    return [f"{name}: {first} call{more} {last}", f"call: ({' | '.join(ways)}) {after}", *rules]


def _arguments(tool: Tool, calls: Calls, prefix: str = "") -> str:
    """The normal form of what a tool takes."""
    schema: Mapping[str, Any] = {"type": "object"}
    if tool.parameters is not None and (tool.strict or calls.held):
        schema = tool.parameters if "type" in tool.parameters else {"type": "object", **tool.parameters}
    return normal_text(schema, calls.place(tool), prefix=prefix)
