"""How much text the gateway takes from one request. Larger ones are refused by name, never cut."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.errors import InvalidArgument


@dataclass(slots=True, frozen=True)
class TextLimits:
    """Bounds that do not depend on the model; those that do are in ModelFacts."""

    stops: int = 64
    stop_bytes: int = 16384  # of all stop strings: they travel in the engine's copy of the request
    token_ids: int = 4096  # in stop_token_ids, allowed_token_ids, logit_bias
    drafts: int = 16  # draft tokens per step
    bad_words: int = 256
    prompts: int = 128
    inputs: int = 2048  # of one request for vectors: OpenAI's own bound
    messages: int = 8192
    media_name: int = 256  # characters of a client's own name for an item
    tools: int = 128  # OpenAI's own bound
    top_logprobs: int = 20  # what the sampler reports at most
    template_chars: int = 65_536  # of a client's own chat template
    render_chars: int = 16_000_000
    render_steps: int = 1_000_000  # turns of loops and calls of macros in one template
    render_s: float = 10.0


DEFAULT_LIMITS = TextLimits()


def check_text(text: str, field: str) -> None:
    """Raises for what is no Unicode text: JSON can hold half of a surrogate pair, which can't be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{field}: character {error.start} is half of a surrogate pair, which is no text", field=field
        ) from None
