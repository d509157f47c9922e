"""A conversation to one prompt text, by the model's own chat template. Knows no tokenizer.

    JSON ──read_messages──▶ Message … ──ChatTemplate.render──▶ text

Templates are programs that came with a model: they run in jinja2's sandbox, with a limit on steps,
time and output, and whatever goes wrong inside is the request's fault (400), not the server's.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.runtime
import jinja2.sandbox
from jinja2 import nodes

from services.common.errors import FailedPrecondition, InvalidArgument
from services.gateway.limits import DEFAULT_LIMITS, TextLimits
from services.gateway.messages import Message
from services.gateway.tools import Tool

_MARK = "\ue000continue\ue001"
"""Stands at the end of the final message while it is rendered; the prompt ends there."""
_PROBE = "\ue002probe\ue003"
_SHORT_IDS = re.compile(r"length\s*!=\s*9\b")
"""Templates of Mistral's models take ids of calls with 9 letters and digits only."""
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "_step"})
"""Variables of templates that have a field of their own."""
_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(slots=True, frozen=True)
class Conversation:
    """What to render: turns, and how the prompt ends."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Tool] = ()


class _Overrun(Exception):
    """A template took too many steps, too long, or wrote too much."""


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with a step counted at every turn of a loop and every call of a macro."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            step = nodes.ExprStmt(nodes.Call(nodes.Name("_step", "load"), [], [], None, None))
            node.body.insert(0, step.set_lineno(node.lineno))  # type: ignore[attr-defined]
        return template

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Products of numbers only: that of a text or list takes any amount of memory in one step."""
        del context
        if operator == "*" and isinstance(left, float | int) and isinstance(right, float | int):
            return left * right
        raise jinja2.exceptions.SecurityError(f"{operator} of these values is not allowed in a chat template")


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks an assistant's words for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        """Its content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **other: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **other)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """One compiled template; `render` may be called from any thread.

    names        variables that it reads: what a request can change
    takes_tools  whether it shows the tools that are offered
    shows_calls  whether it shows the calls of earlier turns
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, limits: TextLimits = DEFAULT_LIMITS
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._limits = limits
        environment = _Environment()
        try:
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except (*_TEMPLATE_FAULTS, SyntaxError) as error:  # SyntaxError: blocks nested deeper than Python takes
            raise FailedPrecondition(
                f"the chat template can't be read: {_said(error)}", field="chat_template"
            ) from None
        self.names = frozenset(names - environment.globals.keys() - {"_step"})
        self.takes_tools = "tools" in self.names
        self.shows_calls = "tool_calls" in source
        self._short_ids = _SHORT_IDS.search(source) is not None
        self._wants_parts = False
        if not self._shows("user"):  # some templates of multimodal models show text only if it comes in parts
            self._wants_parts = True
            self._wants_parts = self._shows("user")
        self.takes_system = self._shows("system") or not self._shows("user")
        self._takes_function = self._shows("function")  # an old role, which many templates pass over in silence

    def render(self, conversation: Conversation) -> str:
        """The prompt; raises InvalidArgument for a conversation that the template does not take."""
        opening = conversation.add_generation_prompt
        if conversation.continue_final_message and opening:
            raise InvalidArgument(
                "continue_final_message: not together with add_generation_prompt", field="continue_final_message"
            )
        if opening is None:
            opening = not conversation.continue_final_message
        messages = [self._checked(message, i) for i, message in enumerate(conversation.messages)]
        if conversation.continue_final_message:
            return self._continue(messages, conversation)
        return self._run(messages, conversation, opening)

    def _checked(self, message: Message, index: int) -> Message:
        role = message.role
        where = f"messages[{index}].role"
        if role == "developer" and not self._names(role):
            role = "system"
        if role == "system" and not self.takes_system:
            raise InvalidArgument(f"{where}: the model's chat template takes no system message", field=where)
        if not (self._takes_function if role == "function" else role in _ROLES or self._names(role)):
            raise InvalidArgument(f"{where}: the model's chat template knows no role {role!r}", field=where)
        return message if role == message.role else replace(message, role=role)

    def _names(self, role: str) -> bool:
        return f"'{role}'" in self.source or f'"{role}"' in self.source

    def _continue(self, messages: list[Message], conversation: Conversation) -> str:
        last = messages[-1]
        where = f"messages[{len(messages) - 1}]"
        if not last.text or last.tool_calls or last.content:
            raise InvalidArgument(
                f"{where}: continue_final_message needs a last message with text, and without calls and media",
                field="continue_final_message",
            )
        marked = [*messages[:-1], replace(last, text=last.text + _MARK)]
        text = self._run(marked, conversation, opening=False)
        at = text.rfind(_MARK)
        if at >= 0:
            return text[:at]
        raise InvalidArgument(
            f"{where}: the model's chat template does not show the last message as it is, so it can't be continued",
            field="continue_final_message",
        )

    def _run(self, messages: Sequence[Message], conversation: Conversation, opening: bool) -> str:
        steps = 0
        deadline = time.monotonic() + self._limits.render_s

        def step() -> str:
            nonlocal steps
            steps += 1
            if steps > self._limits.render_steps or (steps % 256 == 0 and time.monotonic() > deadline):
                raise _Overrun
            return ""

        pieces: list[str] = []
        size = 0
        variables = self._variables(messages, conversation, opening)
        try:
            for piece in self._template.generate(**variables, _step=step):
                pieces.append(piece)
                size += len(piece)
                if size > self._limits.render_chars:
                    raise _Overrun
        except _Overrun:
            raise InvalidArgument(
                "messages: rendering them with the chat template takes too long", field="messages"
            ) from None
        except _TEMPLATE_FAULTS as error:
            raise InvalidArgument(
                f"messages: the model's chat template does not take them: {_said(error)}", field="messages"
            ) from None
        return "".join(pieces)

    def _variables(self, messages: Sequence[Message], conversation: Conversation, opening: bool) -> dict[str, Any]:
        if self._short_ids:
            messages = [_with_short_ids(message) for message in messages]
        return {
            **self._special_tokens,
            **conversation.variables,  # none of RESERVED
            "messages": [message.for_template(parts=self._wants_parts) for message in messages],
            "tools": [tool.for_template() for tool in conversation.tools] or None,
            "documents": conversation.documents,
            "add_generation_prompt": opening,
        }

    def _shows(self, role: str) -> bool:
        """Whether the text of a turn appears in the prompt."""
        turns = [Message(role, _PROBE)] if role == "user" else [Message(role, _PROBE), Message("user", "x")]
        try:
            return _PROBE in self._run(turns, Conversation(()), opening=True)
        except InvalidArgument:
            return False


def _with_short_ids(message: Message) -> Message:
    calls = tuple(replace(call, id=_short_id(call.id)) for call in message.tool_calls)
    return replace(message, tool_calls=calls, tool_call_id=_short_id(message.tool_call_id))


def _short_id(call_id: str | None) -> str | None:
    """An id of 9 letters and digits, the same for the same id, so that results find their calls."""
    if call_id is None or (len(call_id) == 9 and call_id.isascii() and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _said(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "…"
