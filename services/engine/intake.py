"""What makes a request one that can be served: the checks before anything of it is kept."""

from __future__ import annotations

from array import array

from services.common.errors import InvalidArgument, ResourceExhausted
from services.engine.limits import CoreConfig
from services.engine.request import RequestSpec

_RETRY_AFTER_MS = 1000


def check(spec: RequestSpec, context_len: int, vocab_size: int) -> None:
    """Refuses, naming the field, what could never run to its end."""
    if spec.n < 1:
        raise InvalidArgument(f"n is {spec.n}, but at least 1 choice must be asked for", field="n")
    if spec.max_tokens < 1:
        raise InvalidArgument(f"max_tokens is {spec.max_tokens}, but at least 1", field="max_tokens")
    if spec.min_tokens < 0:
        raise InvalidArgument(f"min_tokens is {spec.min_tokens}, but at least 0", field="min_tokens")
    if not spec.prompt:
        raise InvalidArgument("the prompt has no tokens", field="prompt")
    output = 0 if spec.pooling else 1
    if len(spec.prompt) + output > context_len:
        included = ", output included" if output else ""
        raise InvalidArgument(
            f"the prompt has {len(spec.prompt)} tokens; the context holds {context_len}{included}", field="prompt"
        )
    _check_ids(spec.prompt, vocab_size, "prompt")
    if spec.replay and len(spec.replay) != spec.n:
        raise InvalidArgument(f"{len(spec.replay)} choices are replayed, but n is {spec.n}", field="replay")
    for replay in spec.replay:
        _check_ids(replay.token_ids, vocab_size, "replay")


def check_media(spec: RequestSpec, largest_item: int) -> None:
    """Refuses media that do not lie in the prompt one after another, or that could never be encoded."""
    free_from = 0
    sizes: dict[bytes, int] = {}
    for index, item in enumerate(spec.media):
        field = f"media[{index}]"
        if item.length < 1 or item.offset < free_from or item.offset + item.length > len(spec.prompt):
            raise InvalidArgument(
                f"{field} takes {item.length} tokens from {item.offset} on; the prompt has {len(spec.prompt)}, "
                f"free from {free_from} on",
                field=field,
            )
        if not 1 <= item.embeddings <= item.length:
            raise InvalidArgument(f"{field} has {item.embeddings} embeddings for {item.length} tokens", field=field)
        if item.embeddings > largest_item:
            raise InvalidArgument(
                f"{field} makes {item.embeddings} embeddings; the encoder takes {largest_item} at most "
                "(encoder_budget, encoder_cache_size)",
                field=field,
                reason="MEDIA_TOO_LARGE",
            )
        if sizes.setdefault(item.hash, item.embeddings) != item.embeddings:
            raise InvalidArgument(f"{field} has another size than an earlier item with its hash", field=field)
        free_from = item.offset + item.length


def check_queue(spec: RequestSpec, config: CoreConfig, choices: int, tokens: int) -> None:
    """Refuses what would make more wait than may; so much does already. A replay was let in before."""
    if not spec.replay:
        check_limit("choices", spec.n, choices, config.max_waiting_requests)
        check_limit("prompt tokens", spec.n * len(spec.prompt), tokens, config.max_waiting_tokens)


def check_limit(noun: str, new: int, waiting: int, limit: int | None) -> None:
    """Refuses what would make more wait than may: for now, or for good where it exceeds the limit alone."""
    if limit is None or waiting + new <= limit:
        return
    if new > limit:
        raise InvalidArgument(f"{new} {noun} are more than the {limit} that may wait", field="prompt")
    raise ResourceExhausted(
        f"{waiting} {noun} wait already; {new} more would exceed the limit of {limit}",
        reason="QUEUE_FULL",
        retry_after_ms=_RETRY_AFTER_MS,
    )


def _check_ids(ids: array[int], vocab_size: int, field: str) -> None:
    for extreme in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= extreme < vocab_size:
            raise InvalidArgument(f"token id {extreme} is not in the vocabulary of {vocab_size}", field=field)
