"""Tools for models whose chat template has no place for them: told, called and answered in plain turns.

    tools         a block at the end of the system message (of the first user's, where there may be none)
    calls         <tool_call> … </tool_call> in the assistant's text
    results       <tool_response> … </tool_response> in a user's turn, neighbours in one

The words are those that Hermes and Qwen were trained on; other models follow them as instructions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from services.gateway.messages import Message, ToolCall
from services.gateway.parsers.formats import tool_format
from services.gateway.parts import Content
from services.gateway.tools import Tool

FORMAT = "hermes"
_BLOCK = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_RESULT = ("<tool_response>\n", "\n</tool_response>")


def offer(messages: Sequence[Message], tools: Sequence[Tool], *, system: bool) -> tuple[Message, ...]:
    """The turns with the tools told in them; `system` says whether there may be a system message."""
    block = _BLOCK.format(tools="\n".join(json.dumps(tool.for_template(), ensure_ascii=False) for tool in tools))
    if not system:
        at = next((i for i, message in enumerate(messages) if message.role == "user"), None)
        if at is None:
            return (Message("user", block), *messages)
        told = messages[at].told(before=f"{block}\n\n")
        return (*messages[:at], told, *messages[at + 1 :])
    if messages and messages[0].role in ("system", "developer"):
        return (messages[0].told(after=f"\n\n{block}"), *messages[1:])
    return (Message("system", block), *messages)


def tell(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The turns with calls and results as text."""
    told: list[Message] = []
    answering = False  # whether the last turn holds results, so that the next one joins it
    for message in messages:
        if message.role == "tool":
            shown = message.told(*_RESULT)
            result = Message("user", shown.text, content=shown.content)
            if answering:
                told[-1] = _joined(told[-1], result)
            else:
                told.append(result)
        else:
            told.append(_told(message) if message.tool_calls else message)
        answering = message.role == "tool"
    return tuple(told)


def _joined(first: Message, second: Message) -> Message:
    """Two turns of the same speaker as one."""
    content: Content = ()
    if first.content or second.content:
        content = (*(first.content or (first.text,)), "\n", *(second.content or (second.text,)))
    return replace(first, text=f"{first.text}\n{second.text}", content=content)


def _told(message: Message) -> Message:
    calls = tool_format(FORMAT).shape.write(tuple(map(_written, message.tool_calls)))
    return replace(message, text=f"{message.text}\n{calls}" if message.text else calls, tool_calls=())


def _written(call: ToolCall) -> tuple[str, str]:
    arguments = json.loads(call.arguments) if call.arguments.strip() else {}
    return call.name, json.dumps(arguments, ensure_ascii=False)
