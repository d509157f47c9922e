"""A conversation to one prompt text, by the model's own chat template. Knows no tokenizer.

    JSON ──read_messages──▶ Message … ──ChatTemplate.render──▶ text

Templates are programs that came with a model: they run in jinja2's sandbox, with a limit on steps,
time and output, and whatever goes wrong inside is the request's fault (400), not the server's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.runtime
import jinja2.sandbox
from jinja2 import nodes

from services.common.errors import FailedPrecondition, InvalidArgument
from services.gateway.limits import DEFAULT_LIMITS, TextLimits
from services.gateway.messages import Message

_MARK = "\ue000continue\ue001"
"""Stands at the end of the final message while it is rendered; the prompt ends there."""
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "_step"})
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
    """One compiled template; `render` may be called from any thread."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, limits: TextLimits = DEFAULT_LIMITS
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._limits = limits
        try:
            self._template = _Environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise FailedPrecondition(
                f"the model's chat template can't be read: {error}", field="chat_template"
            ) from None
        self._wants_parts = self._probe()

    def render(self, conversation: Conversation) -> str:
        """The prompt; raises InvalidArgument for a conversation that the template does not take."""
        opening = conversation.add_generation_prompt
        if conversation.continue_final_message and opening:
            raise InvalidArgument(
                "continue_final_message: not together with add_generation_prompt", field="continue_final_message"
            )
        if opening is None:
            opening = not conversation.continue_final_message
        for name in conversation.variables:
            if name in _RESERVED:
                raise InvalidArgument(
                    f"chat_template_kwargs.{name}: has a field of its own", field=f"chat_template_kwargs.{name}"
                )
        messages = [self._checked(message, i) for i, message in enumerate(conversation.messages)]
        if conversation.continue_final_message:
            return self._continue(messages, conversation)
        return self._run(messages, conversation, opening)

    def _checked(self, message: Message, index: int) -> Message:
        role = message.role
        if role == "developer" and not self._names(role):
            return replace(message, role="system")
        if role not in {"system", "developer", "user", "assistant", "tool", "function"} and not self._names(role):
            where = f"messages[{index}].role"
            raise InvalidArgument(f"{where}: the model's chat template knows no role {role!r}", field=where)
        return message

    def _names(self, role: str) -> bool:
        return f"'{role}'" in self.source or f'"{role}"' in self.source

    def _continue(self, messages: list[Message], conversation: Conversation) -> str:
        last = messages[-1]
        where = f"messages[{len(messages) - 1}]"
        if not last.text:
            raise InvalidArgument(
                f"{where}: continue_final_message needs a last message with text", field="continue_final_message"
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
        return {
            **self._special_tokens,
            **conversation.variables,
            "messages": [message.for_template(parts=self._wants_parts) for message in messages],
            "tools": None,
            "documents": conversation.documents,
            "add_generation_prompt": opening,
        }

    def _probe(self) -> bool:
        """Whether the template shows text only if it comes in parts, as some of multimodal models do."""
        self._wants_parts = False
        for parts in (False, True):
            self._wants_parts = parts
            try:
                shown = self._run([Message("user", "\ue002probe\ue003")], Conversation(()), opening=True)
            except InvalidArgument:
                continue
            if "\ue002probe\ue003" in shown:
                return parts
        return False


def _said(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + "…"
