"""Random workloads: small pools, small budgets, prompts that share their beginnings."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, replace
from typing import Any

from services.engine.limits import CoreConfig
from services.engine.request import MediaItem, Replay, RequestSpec, choice_seed
from tests.engine.fake_worker import VOCABULARY, undisturbed
from tests.engine.harness import make_config, make_spec

POLICIES = ("fcfs", "priority", "fair")
BEGINNING = tuple(range(1, 13))


@dataclass(frozen=True)
class Action:
    """One call: "submit" (spec), "abort" (handle, choice), "plan", "apply", "turn", "expire", "tick" (seconds)."""

    kind: str
    spec: RequestSpec | None = None
    handle: int = 0
    choice: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Workload:
    """An engine's numbers, and what happens to it."""

    config: CoreConfig
    policy: str
    ageing_s: float
    actions: tuple[Action, ...]


def random_config(draw: random.Random, depth: int) -> CoreConfig:
    block_size = draw.choice((1, 2, 4))
    return make_config(
        max_num_batched_tokens=draw.choice((1, 3, 8, 8, 16, 40)),
        max_num_seqs=draw.choice((1, 2, 3, 4, 8)),
        max_model_len=draw.choice((12, 20, 40)),
        block_size=block_size,
        num_blocks=max(3, draw.choice((10, 14, 20, 30, 48)) // block_size),
        enable_prefix_caching=draw.random() < 0.8,
        output_reserve_blocks=draw.choice((0, 0, 0, 1, 2)),
        max_waiting_requests=draw.choice((None, None, None, 6)),
        max_waiting_tokens=draw.choice((None, None, None, 60)),
        max_prefill_tokens=draw.choice((None, None, 1, 3, 5)),
        max_preemptions=draw.choice((1, 1, 2, 8)),
        encoder_budget=draw.choice((None, 3, 3, 4)),
        encoder_cache_size=draw.choice((None, 3, 3, 5)),
        steps_in_flight=depth,
    )


def random_media(draw: random.Random, prompt_len: int) -> tuple[MediaItem, ...]:
    """Up to two items of up to 4 embeddings, in the order of their places; few hashes, each of one size."""
    items: list[MediaItem] = []
    free_from = 0
    for _ in range(draw.choice((1, 2, 2))):
        key = draw.randrange(3)
        length = 2 + key
        offset = free_from + draw.randint(0, 2)
        free_from = offset + length
        if free_from > prompt_len:
            break
        items.append(MediaItem(bytes([key]) * 32, "image", offset, length, 1 + key))
    return tuple(items)


def random_spec(draw: random.Random, handle: int, policy: str, context: int, with_media: bool) -> RequestSpec:
    beginning = BEGINNING[: draw.choice((0, 0, 4, 7, 8, 12))]
    prompt = [*beginning, *(draw.randrange(3) for _ in range(draw.randint(0 if beginning else 1, 16)))]
    if with_media:
        prompt += [draw.randrange(3) for _ in range(6)]
    prompt = prompt[: max(1, context - draw.choice((0, 1, 1, 1, 4)))]
    given: dict[str, Any] = {
        "n": draw.choice((1, 1, 1, 2, 3)),
        "seed": draw.randrange(4),
        "max_tokens": draw.randint(1, 14),
        "min_tokens": draw.choice((0, 0, 3, 100)),
        "eos_ids": frozenset(draw.sample(range(VOCABULARY), draw.choice((0, 3)))),
        "stop_ids": frozenset(draw.sample(range(VOCABULARY), draw.choice((0, 3)))),
        "tenant": draw.choice(("", "a", "b")),
        "cache_salt": draw.choice(("", "", "salt")),
        "prompt_logprobs": draw.choice((None, None, None, None, 0)),
        "deadline_s": draw.choice((None, None, None, 2.5)),
        "priority": draw.choice((0, 0, 1, -1, 3)) if policy != "fcfs" else 0,
        "media": random_media(draw, len(prompt)) if with_media and draw.random() < 0.9 else (),
    }
    spec = make_spec(handle, prompt, **given)
    if draw.random() < 0.1:
        given["replay"] = tuple(random_replay(draw, spec, choice) for choice in range(spec.n))
    return make_spec(handle, prompt, **given)


def random_replay(draw: random.Random, spec: RequestSpec, choice: int) -> Replay:
    """Some of the tokens that the choice would have got."""
    ends = spec.eos_ids | spec.stop_ids
    tokens = undisturbed(spec.prompt, choice_seed(spec.seed, choice), spec.max_tokens, ends, spec.min_tokens)
    return Replay(array("i", tokens[: draw.randrange(len(tokens))]))


def random_actions(draw: random.Random, config: CoreConfig, policy: str) -> list[Action]:
    context = min(config.max_model_len, config.num_blocks * config.block_size)
    actions: list[Action] = []
    handles = 0
    burst = draw.choice((1, 2, 6))
    with_media = draw.random() < 0.5
    for _ in range(draw.randint(2, 32)):
        dice = draw.random()
        if dice < 0.16:
            for _ in range(draw.randint(1, burst)):
                actions.append(Action("submit", spec=random_spec(draw, handles, policy, context, with_media)))
                handles += 1
        elif dice < 0.20 and handles:
            choice = draw.choice((None, 0, 1))
            actions.append(Action("abort", handle=draw.randrange(handles), choice=choice))
        elif dice < 0.25:
            actions.append(Action("expire"))
        elif dice < 0.35:
            actions.append(Action("tick", seconds=draw.choice((0.5, 1.0, 4.0))))
        else:
            actions.append(Action(draw.choice(("plan", "apply", "turn"))))
    return actions


def small_past_large(draw: random.Random, config: CoreConfig, policy: str, ageing_s: float) -> Workload:
    """One that holds a few blocks for long, some that need the whole pool, and many small ones that fit beside it."""
    config = replace(
        config,
        max_num_batched_tokens=8,
        max_num_seqs=4,
        max_model_len=40,
        num_blocks=40 // config.block_size,
        output_reserve_blocks=0,
        max_waiting_requests=None,
        max_waiting_tokens=None,
        max_prefill_tokens=None,
    )
    large = draw.choice((1, 1, 4, 5))
    actions: list[Action] = []
    for handle, length in enumerate([1] + [38] * large + [1] * 70):
        max_tokens = 38 if handle == 0 else 1
        actions.append(Action("submit", spec=make_spec(handle, [handle % VOCABULARY] * length, max_tokens)))
        if handle > large and draw.random() < 0.3:
            actions.append(Action("turn"))
    return Workload(config, policy, ageing_s, tuple(actions))


def random_workload(seed: int, policy: str, depth: int) -> Workload:
    draw = random.Random(seed)
    config = random_config(draw, depth)
    ageing_s = draw.choice((1.0, 5.0, 60.0))
    if draw.random() < 0.06:
        return small_past_large(draw, config, policy, ageing_s)
    return Workload(config, policy, ageing_s, tuple(random_actions(draw, config, policy)))
