"""Blocks: the free queue, what is known by its content, and what is available to who waits."""

from __future__ import annotations

from services.engine.limits import CoreConfig
from tests.engine.oracle.choice import Choice

Name = tuple[str, tuple[int, ...], tuple[tuple[bytes, int], ...]]
"""Of a full block: the salt, all tokens up to its end, the media that begin before it."""


class Pool:
    """All blocks. `free` is the queue, front first."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.free = list(range(config.num_blocks))
        self.names: dict[int, Name] = {}  # of blocks that are full and computed, in the order in which they became so
        self.holders: dict[int, int] = dict.fromkeys(range(config.num_blocks), 0)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def name_of(self, choice: Choice, index: int) -> Name:
        end = (index + 1) * self.config.block_size
        spec = choice.asked.spec
        media = tuple((item.hash, item.offset) for item in spec.media if item.offset < end)
        return spec.cache_salt, tuple(choice.tokens[:end]), media

    def find(self, name: Name) -> int | None:
        return next((block for block, other in self.names.items() if other == name), None)

    def look_up(self, choice: Choice) -> list[int]:
        """The longest run of leading full blocks of its tokens that are found."""
        if not self.config.enable_prefix_caching or choice.asked.logprobs_told < choice.prompt_len:
            return []
        found: list[int] = []
        for index in range(len(choice.tokens) // self.config.block_size):
            block = self.find(self.name_of(choice, index))
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, choice: Choice, found: list[int]) -> None:
        """The choice begins with these blocks."""
        for block in found:
            if self.holders[block] == 0:
                self.free.remove(block)
            self.holders[block] += 1
            choice.blocks.append(block)

    def give(self, choice: Choice, count: int) -> None:
        """That many blocks from the front of the queue; what was in them can't be found any more."""
        for _ in range(count):
            block = self.free.pop(0)
            self.names.pop(block, None)
            self.holders[block] = 1
            choice.blocks.append(block)

    def take_back(self, choice: Choice) -> None:
        """The choice leaves its row. What others hold as well need not be kept twice."""
        for block in reversed(choice.blocks):
            self.holders[block] -= 1
            if self.holders[block] > 0:
                continue
            if self.twins(block):
                del self.names[block]
            if block in self.names:
                self.free.append(block)
            else:
                self.free.insert(0, block)
        choice.blocks = []

    def twins(self, block: int) -> list[int]:
        """Other blocks with the same name."""
        name = self.names.get(block)
        return [other for other, its in self.names.items() if its == name and other != block and name is not None]

    def enter(self, choice: Choice, start: int, end: int) -> None:
        """The blocks that tokens from `start` up to `end` filled can be found from now on."""
        if not self.config.enable_prefix_caching:
            return
        size = self.config.block_size
        for index in range(start // size, end // size):
            block = choice.blocks[index]
            self.names.setdefault(block, self.name_of(choice, index))
            for twin in self.twins(block):
                if self.holders[twin] == 0:
                    del self.names[twin]
                    self.free.remove(twin)
                    self.free.insert(0, twin)

    def wanted(self, choice: Choice) -> int:
        """N: blocks that it must be sure of to start."""
        return self.blocks_for(choice.limit if self.is_protected(choice) else choice.known)

    def out_of_reach(self, choice: Choice, running: list[Choice]) -> int:
        """Blocks that the choice may not take: what is promised to protected ones is theirs."""
        others = [each for each in running if each is not choice and self.is_protected(each)]
        return self.promised(others)

    def is_protected(self, choice: Choice) -> bool:
        return choice.preemptions >= self.config.max_preemptions

    def promised(self, running: list[Choice]) -> int:
        """Blocks that these were admitted for and have not taken."""
        return sum(max(0, choice.needed - (len(choice.blocks) - choice.found)) for choice in running)

    def available(self, running: list[Choice]) -> int:
        """With these running."""
        reserve = self.config.output_reserve_blocks * len(running)
        return len(self.free) - self.promised(running) - reserve

    def available_without(self, running: list[Choice], victims: list[Choice]) -> int:
        """What would be available if the victims left their rows."""
        stay = [choice for choice in running if choice not in victims]
        held = {block for choice in stay for block in choice.blocks}
        freed = {block for choice in victims for block in choice.blocks} - held
        return self.available(stay) + len(freed)
