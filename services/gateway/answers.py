"""What an answer to a conversation may hold: reasoning, calls of tools. By the model's chat template.

    template ──▶ AnswerForm (once) ──▶ ReasoningOptions, ToolOptions (per request)

A template is the model's own word for how it reasons and writes calls; settings may overrule it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from services.common.errors import InvalidArgument
from services.gateway import toolless
from services.gateway.asked import Asked
from services.gateway.chat import ChatTemplate
from services.gateway.fields import Api, Caller, accepted
from services.gateway.kinds import wrong
from services.gateway.parsers.formats import TAGS, detect_reasoning, detect_tools, markers
from services.gateway.vocabulary import Vocabulary

AUTO: Final = "auto"
NONE: Final = "none"
_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn thinking on and off."""


@dataclass(slots=True, frozen=True)
class AnswerForm:
    """How a model with a certain chat template answers.

    tool_format  name of the way in which it writes calls; None if it can't be known
    reasoning    the tags around its reasoning; None if it does not reason
    """

    tool_format: str | None
    reasoning: tuple[str, str] | None

    @classmethod
    def of(cls, template: ChatTemplate, tool_parser: str, reasoning_parser: str) -> AnswerForm:
        """By the settings, and the template where they say "auto"."""
        if not template.takes_tools:  # the model is told one format, and no other can be expected
            tools = toolless.FORMAT if tool_parser in (AUTO, toolless.FORMAT) else None
        elif tool_parser == AUTO:
            tools = detect_tools(template.source)
        else:
            tools = None if tool_parser == NONE else tool_parser
        if reasoning_parser == AUTO:
            reasoning = detect_reasoning(template.source)
        else:
            reasoning = None if reasoning_parser == NONE else TAGS[reasoning_parser]
        return cls(tools, reasoning)

    def kept_ids(self, vocabulary: Vocabulary, *, tools: bool) -> tuple[int, ...]:
        """Special ids that must be seen to tell reasoning and calls from text."""
        texts = [*(self.reasoning or ()), *(markers(self.tool_format) if tools and self.tool_format else ())]
        found = (vocabulary.special_id(text) for text in texts)
        return tuple(dict.fromkeys(token_id for token_id in found if token_id is not None))


def read_effort(asked: Asked, caller: Caller) -> tuple[str | None, str]:
    """How much the model is to think, and how the client spells that field."""
    if caller.api is not Api.RESPONSES:
        return asked.reasoning_effort, caller.spell("reasoning_effort")
    field = "reasoning.effort"
    if asked.reasoning is None:
        return None, field
    if not isinstance(asked.reasoning, dict):
        raise wrong("reasoning", "an object with effort", asked.reasoning)
    for key, value in asked.reasoning.items():
        if key != "effort" and value is not None:
            raise InvalidArgument(f"reasoning.{key}: not supported by this server", field=f"reasoning.{key}")
    effort = asked.reasoning.get("effort")
    if effort is None:
        return None, field
    read: str = accepted(Api.CHAT)["reasoning_effort"].kind.read(effort, field)
    return read, field


def effort_variables(effort: str | None, field: str, names: Collection[str], *, reasons: bool) -> Mapping[str, Any]:
    """The variables that tell a template with these `names` how much to think; refuses what it can't be told."""
    if effort is None:
        return {}
    switch = next((name for name in _SWITCHES if name in names), None)
    if "reasoning_effort" in names:
        return {"reasoning_effort": effort, **({switch: False} if switch and effort == "none" else {})}
    if switch is None:
        if effort == "none" and not reasons:
            return {}
        raise InvalidArgument(f"{field}: the model's chat template knows no effort of reasoning", field=field)
    if effort not in ("none", "medium"):
        raise InvalidArgument(
            f'{field}: the model thinks or does not: must be "none" or "medium", not "{effort}"', field=field
        )
    return {switch: effort == "medium"}
