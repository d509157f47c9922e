"""What the oracle knows of a request (Asked) and of each of its choices."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.engine.events import FINISH_EOS, FINISH_LENGTH, FINISH_NONE, FINISH_STOP_ID
from services.engine.request import MediaItem, RequestSpec


@dataclass(eq=False)
class Asked:
    """What the choices of one request share."""

    spec: RequestSpec
    arrived: float
    logprobs_told: int  # prompt positions whose log probabilities have been told; all when none were asked for
    choices: list[Choice] = field(default_factory=list)
    prompt_applied: bool = False
    found_tokens: int | None = None  # by its first run

    def live(self) -> list[Choice]:
        return [choice for choice in self.choices if not choice.ended]


@dataclass(eq=False)
class Choice:
    """One sequence of tokens: prompt, then outputs."""

    asked: Asked
    index: int
    arrival: int
    limit: int  # tokens at which it ends
    tokens: list[int]
    known: int
    computed: int = 0
    running: bool = False
    runs: int = 0  # how often it was put on a row; results of an older run are dropped
    preemptions: int = 0
    overtaken: int = 0
    ended: int = FINISH_NONE
    blocks: list[int] = field(default_factory=list)
    found: int = 0  # blocks that this run found in the prefix cache
    needed: int = 0  # blocks that this run needed beyond those when it was admitted
    holds: list[MediaItem] = field(default_factory=list)  # items whose embeddings it holds

    @property
    def name(self) -> tuple[int, int]:
        return self.asked.spec.owner.handle, self.index

    @property
    def tenant(self) -> str:
        return self.asked.spec.tenant

    @property
    def priority(self) -> int:
        return self.asked.spec.priority

    @property
    def prompt_len(self) -> int:
        return len(self.asked.spec.prompt)

    @property
    def gap(self) -> int:
        return self.known - self.computed if self.known < self.limit else 0

    def finish(self) -> int:
        """What its last token brings about."""
        spec = self.asked.spec
        outputs = len(self.tokens) - self.prompt_len
        if outputs > min(spec.min_tokens, self.limit - self.prompt_len):
            if self.tokens[-1] in spec.eos_ids:
                return FINISH_EOS
            if self.tokens[-1] in spec.stop_ids:
                return FINISH_STOP_ID
        return FINISH_LENGTH if len(self.tokens) >= self.limit else FINISH_NONE


def choices_of(spec: RequestSpec, now: float, arrival: int, context: int) -> Asked:
    """The request with all its choices, arrivals counted from `arrival` on."""
    replayed = any(replay.token_ids for replay in spec.replay)
    wants = spec.prompt_logprobs is not None and not replayed
    asked = Asked(spec, now, 0 if wants else len(spec.prompt))
    for index in range(spec.n):
        tokens = list(spec.prompt)
        ended = FINISH_NONE
        if spec.replay:
            tokens += spec.replay[index].token_ids
            ended = spec.replay[index].finish
        limit = len(spec.prompt) + min(spec.max_tokens, context - len(spec.prompt))
        choice = Choice(asked, index, arrival + index, limit, tokens, len(tokens), ended=ended)
        if not ended and len(tokens) > len(spec.prompt):
            choice.ended = choice.finish()
        asked.choices.append(choice)
    return asked
