"""The formats of calls and the tags of reasoning, by name and as a model's chat template tells them.

A template is the model's own word for what its answers look like: it shows earlier answers in the
same form. What it does not tell is not guessed.
"""

from __future__ import annotations

from services.gateway.parsers.hermes import HERMES
from services.gateway.parsers.llama3 import LLAMA3
from services.gateway.parsers.mistral import MISTRAL, MISTRAL_NAMED
from services.gateway.parsers.shape import CallShape, ToolFormat

__all__ = [
    "TAGS",
    "TOOL_FORMATS",
    "CallShape",
    "ToolFormat",
    "detect_reasoning",
    "detect_tools",
    "markers",
    "opens_reasoning",
    "tool_format",
]

TOOL_FORMATS = {known.name: known for known in (HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED)}
TAGS = {
    "think": ("<think>", "</think>"),
    "thinking": ("<thinking>", "</thinking>"),
    "bracket_think": ("[THINK]", "[/THINK]"),
    "seed_think": ("<seed:think>", "</seed:think>"),
    "thought": ("<|begin_of_thought|>", "<|end_of_thought|>"),
    "reasoning": ("<reasoning>", "</reasoning>"),
}
"""Tags of reasoning: what opens and what closes it. No tag begins within another or within itself."""

_OTHERS = ("<function=", "<arg_key>", "<tool_calls>")
"""What stands in or around Hermes' tags in templates of models that write their calls otherwise."""


def tool_format(name: str) -> ToolFormat:
    """One of TOOL_FORMATS."""
    return TOOL_FORMATS[name]


def markers(name: str) -> tuple[str, ...]:
    """What the format's parser must see, though special tokens are left out of texts."""
    return TOOL_FORMATS[name].markers


def detect_tools(template_source: str) -> str | None:
    """The name of the format in which a model with this chat template writes calls; None if it does not tell."""
    if "[TOOL_CALLS]" in template_source:
        return "mistral_named" if "[ARGS]" in template_source else "mistral"
    if "<tool_call>" in template_source and not any(other in template_source for other in _OTHERS):
        return "hermes"
    names_parameters = '"parameters"' in template_source or "'parameters'" in template_source
    if "<|python_tag|>" in template_source or ("<|start_header_id|>" in template_source and names_parameters):
        return "llama3"
    return None


def detect_reasoning(template_source: str) -> tuple[str, str] | None:
    """The tags in which a model with this chat template reasons; None if it does not tell."""
    return next((tags for tags in TAGS.values() if tags[1] in template_source), None)


def opens_reasoning(prompt_text: str, tags: tuple[str, str], continued: str = "") -> bool:
    """Whether a prompt ends inside reasoning: with its opening tag, or within that of a message to be `continued`.

    Tags further up are somebody's words and open nothing.
    """
    opening, closing = tags
    if prompt_text.rstrip().endswith(opening):
        return True
    return continued.rfind(opening) > continued.rfind(closing)
