"""What limits an engine: the numbers that its core is made with."""

from __future__ import annotations

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
    enable_prefix_caching: bool = True
    output_reserve_blocks: int = 1  # kept free per running choice when another is admitted
    max_waiting_requests: int | None = None  # choices; None means no limit
    max_waiting_tokens: int | None = None
    max_prefill_tokens: int | None = None  # of one request in a step, while others wait for tokens
    max_preemptions: int = 8  # of one choice
    encoder_budget: int | None = None  # embeddings of one step; None means that no item is too large
    encoder_cache_size: int | None = None  # embeddings kept; None means the same
    steps_in_flight: int = 2
