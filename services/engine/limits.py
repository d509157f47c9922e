"""What limits an engine: the numbers that its core is made with."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class CoreConfig:
    """What limits the core; all counts are per engine."""

    max_num_batched_tokens: int  # tokens of one step
    max_num_seqs: int  # choices that run at once: rows
    max_model_len: int  # prompt plus output of one choice
    block_size: int  # tokens per KV block
    num_blocks: int
    vocab_size: int
    kv_windows: tuple[int | None, ...] = (None,)  # per KV group, tokens that attention looks back over; None is all
    enable_prefix_caching: bool = True
    output_reserve_blocks: int = 1  # kept free per running choice when another is admitted
    max_waiting_requests: int | None = None  # choices; None means no limit
    max_waiting_tokens: int | None = None
    policy: str = "priority"  # "fcfs", "priority" or "fair"
    ageing_s: float = math.inf  # of waiting that make up for one level of priority
    max_prefill_tokens: int | None = None  # of one request in a step, while others wait for tokens
    max_preemptions: int = 8  # of one choice
    encoder_budget: int | None = None  # embeddings of one step; None means that no item is too large
    encoder_cache_size: int | None = None  # embeddings kept; None means the same
    num_speculative_tokens: int = 0  # drafts per step of a request that does not say; 0 is none
    max_speculative_tokens: int = 0  # drafts per step at most, whatever a request says
    speculative_batch: int | None = None  # tokens of a step up to which drafts are nearly free; None: all are
    speculative_limit: int | None = None  # tokens of a step that drafts do not make it exceed; None: no limit
    ngram_min: int = 2  # tokens that must have occurred before, to propose what followed them
    ngram_max: int = 24  # tokens that are compared
    steps_in_flight: int = 2
