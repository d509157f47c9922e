"""One grammar of all that an answer may be.

    [ reasoning ] { text by the client's constraint | calls of tools whose arguments follow their schemas }

Where only an answer is wanted, it stays of its own kind, which costs least.
"""

from __future__ import annotations

import json
from typing import Any

from services.gateway.constraints.lark import SPACE, expression, literal, without
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
    if calls.choice.forced:
        return _composed(["start: body", *_calls(calls, around, "body")], around)
    if wanted is None:
        return _composed(_free_or_calls(calls, around), around)
    return _composed(_answer_or_calls(wanted, calls, around), around)


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
    special = around.special_ids
    closing = f"THOUGHT {literal(reasoning.close, special)} space"
    before = closing if reasoning.inside else f"(space {literal(reasoning.open, special)} {closing})?"
    thought = f"THOUGHT: {without([reasoning.close])}"
    return Constraint("lark", "\n".join([f"start: {before} ({start})", *rules[1:], thought, f"space: {SPACE}"]))


def _free_or_calls(calls: Calls, around: Surroundings) -> list[str]:
    """Any text in which no call begins, and then calls."""
    shape = calls.shape
    begins = shape.opening + shape.before_name
    mark = next((mark for mark in calls.marks if begins.startswith(mark)), None)
    if mark is None:  # unmarked calls are the whole answer
        return [
            "start: TEXT? | calls",
            r"TEXT: /(?s:.+)/ & ~/\s*\{(?s:.*)/",
            *_calls(calls, around, "calls"),
        ]
    return ["start: TEXT calls?", f"TEXT: {without([mark])}", *_calls(calls, around, "calls")]


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
    options: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    space = answer.pop("x-guidance")
    for at, made in enumerate([answer, *(json.loads(_arguments(tool, calls)) for tool in calls.tools)]):
        made.pop("x-guidance", None)
        moved = _moved(made, f"{at}.")
        definitions.update(moved.pop("$defs", {}))
        if at:
            tool = calls.tools[at - 1]
            moved = {
                "type": "object",
                "properties": {"name": {"enum": [tool.name]}, key: moved},
                "required": ["name", key],
                "additionalProperties": False,
            }
        options.append(moved)
    return "%json " + json.dumps({"x-guidance": space, "anyOf": options, "$defs": definitions}, ensure_ascii=False)


def _moved(schema: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The same normal form with other names for its definitions."""
    text = json.dumps(schema, ensure_ascii=False).replace('{"$ref": "#/$defs/', f'{{"$ref": "#/$defs/{prefix}')
    moved: dict[str, Any] = json.loads(text)
    definitions = moved.get("$defs")
    if isinstance(definitions, dict):
        moved["$defs"] = {prefix + name: definition for name, definition in definitions.items()}
    return moved


def _calls(calls: Calls, around: Surroundings, name: str) -> list[str]:
    """The rules of calls, one or more."""
    shape, special = calls.shape, around.special_ids
    chosen = calls.offered
    more = f" ({literal(shape.between, special)} call)*" if calls.parallel else ""
    head, tail = literal(shape.opening, special), literal(shape.closing, special)
    ways, rules = [], []
    for at, tool in enumerate(chosen):
        written = literal(f"{tool.name}{shape.before_arguments}", special)
        ways.append(f"{written} arguments_{at}")
        rules.append(f"arguments_{at}: %json {_arguments(tool, calls)}")
    before, after = literal(shape.before_name, special), literal(shape.after_call, special)
    return [f"{name}: {head} call{more} {tail}", f"call: {before} ({' | '.join(ways)}) {after}", *rules]


def _arguments(tool: Tool, calls: Calls) -> str:
    """The normal form of what a tool takes."""
    if tool.parameters is None or not (calls.choice.forced or tool.strict):
        return normal_text({"type": "object"}, calls.place(tool))
    schema = tool.parameters if "type" in tool.parameters else {"type": "object", **tool.parameters}
    return normal_text(schema, calls.place(tool))
