"""The block pool against a plain list."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.kv.blocks import BlockPool, CacheChange


def test_blocks_are_given_out_in_the_order_of_the_queue() -> None:
    pool = BlockPool(4)
    assert pool.take(3) == [0, 1, 2]
    assert pool.free_blocks() == [3]
    assert pool.take(1) == [3]
    assert pool.num_free == 0
    assert pool.free_blocks() == []
    assert pool.take(0) == []


def test_a_block_is_free_when_its_last_holder_drops_it() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.hold(block)
    pool.drop([block])
    assert pool.free_blocks() == [1]
    pool.drop([block])
    assert sorted(pool.free_blocks()) == [0, 1]


def test_blocks_with_content_leave_last_and_the_tail_of_a_chain_before_its_head() -> None:
    pool = BlockPool(5)
    chain = pool.take(3)
    pool.index(chain[0], b"head")
    pool.index(chain[1], b"tail")
    pool.drop(reversed(chain))
    assert pool.free_blocks() == [2, 3, 4, 1, 0]
    pool.take(4)
    assert pool.find(b"tail") is None
    assert pool.find(b"head") == 0


def test_a_free_block_that_is_found_leaves_the_queue_from_its_middle() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    for block in blocks:
        pool.index(block, bytes([block]))
    pool.drop(blocks)
    pool.hold(1)
    assert pool.free_blocks() == [0, 2]
    assert pool.num_free == 2
    assert pool.find(bytes([1])) == 1


def test_of_two_held_blocks_with_one_content_one_is_found_as_long_as_either_is_held() -> None:
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.index(first, b"same")
    pool.index(second, b"same")
    assert pool.find(b"same") == first
    assert pool.num_indexed == 1
    pool.drop([first])
    assert pool.find(b"same") == second
    assert pool.free_blocks() == [first, 2], "a copy goes first: nothing is lost with it"
    pool.drop([second])
    assert pool.free_blocks() == [first, 2, second]
    assert pool.find(b"same") == second
    pool.take(3)
    assert pool.find(b"same") is None
    assert pool.names == [None, None, None]


def test_a_held_block_takes_the_place_of_a_free_one_with_its_content() -> None:
    pool = BlockPool(3)
    free, held = pool.take(2)
    pool.index(free, b"same")
    pool.drop([free])
    assert pool.free_blocks() == [2, free]
    pool.index(held, b"same")
    assert pool.find(b"same") == held
    assert pool.free_blocks() == [free, 2]
    assert pool.num_indexed == 1


def test_groups_share_blocks_and_no_names() -> None:
    pool = BlockPool(4, 2)
    full, sliding = pool.take(2)
    pool.index(full, b"name", group=0)
    assert pool.find(b"name", 1) is None
    pool.index(sliding, b"name", group=1)
    assert (pool.find(b"name", 0), pool.find(b"name", 1)) == (full, sliding)
    pool.drop([full, sliding])
    pool.take(3)
    assert (pool.find(b"name", 0), pool.find(b"name", 1)) == (None, sliding)


def test_forgetting_leaves_what_is_held() -> None:
    pool = BlockPool(2)
    kept, free = pool.take(2)
    pool.index(kept, b"kept")
    pool.index(free, b"free")
    pool.drop([free])
    assert pool.forget_free() == 1
    assert pool.find(b"kept") == kept
    assert pool.find(b"free") is None
    assert pool.forget_free() == 0


class Model:
    """A pool of lists, in which everything is looked for."""

    def __init__(self, num_blocks: int) -> None:
        self.queue = list(range(num_blocks))
        self.refs = [0] * num_blocks
        self.contents: list[tuple[int, bytes] | None] = [None] * num_blocks
        self.parents: dict[bytes, bytes] = {}

    def take(self, count: int) -> list[int]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        for block in taken:
            self.refs[block], self.contents[block] = 1, None
        return taken

    def drop(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block]:
            return
        content = self.contents[block]
        if content is None or self.holders(content):
            self.contents[block] = None
            self.queue.insert(0, block)
        else:
            self.queue.append(block)

    def index(self, block: int, group: int, name: bytes, parent: bytes) -> None:
        for other in self.queue.copy():
            if self.contents[other] == (group, name):
                self.contents[other] = None
                self.queue.remove(other)
                self.queue.insert(0, other)
        self.contents[block] = (group, name)
        self.parents[name] = parent

    def holders(self, content: tuple[int, bytes]) -> list[int]:
        return [block for block, refs in enumerate(self.refs) if refs and self.contents[block] == content]

    def findable(self, content: tuple[int, bytes]) -> list[int]:
        return self.holders(content) or [block for block in self.queue if self.contents[block] == content]

    def index_of_group_0(self) -> dict[bytes, bytes]:
        return {content[1]: self.parents[content[1]] for content in self.contents if content and content[0] == 0}


NAMES = (b"a", b"b", b"c")
VERBS = ("take", "take", "hold", "drop", "drop", "index", "index", "index", "forget")


@given(st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 7), st.integers(0, 1), st.sampled_from(NAMES))))
def test_a_pool_is_what_lists_would_be(calls: list[tuple[str, int, int, bytes]]) -> None:
    pool, model = BlockPool(8, 2), Model(8)
    seen = dict(pool.watch().names)
    for verb, number, group, name in calls:
        if verb == "take" and number <= len(model.queue):
            assert pool.take(number) == model.take(number)
        elif verb == "hold" and (block := pool.find(name, group)) is not None:
            pool.hold(block)
            if model.refs[block] == 0:
                model.queue.remove(block)
            model.refs[block] += 1
        elif verb == "drop" and model.refs[number]:
            pool.drop([number])
            model.drop(number)
        elif verb == "index" and model.refs[number] and model.contents[number] is None:
            pool.index(number, name, name * 2, group)
            model.index(number, group, name, name * 2)
        elif verb == "forget":
            forgotten = [block for block in model.queue if model.contents[block]]
            assert pool.forget_free() == len(forgotten)
            for block in forgotten:
                model.contents[block] = None
        assert pool.free_blocks() == model.queue
        assert pool.num_free == len(model.queue)
        assert pool.refs == model.refs
        assert pool.num_indexed == len({content for content in model.contents if content})
        for content in ((group, name) for group in (0, 1) for name in NAMES):
            findable = model.findable(content)
            found = pool.find(content[1], content[0])
            assert found in findable if findable else found is None
        seen = told(seen, pool.take_changes())
        assert seen == model.index_of_group_0()


def told(before: dict[bytes, bytes | None], change: CacheChange | None) -> dict[bytes, bytes | None]:
    """What somebody knows who hears of a change."""
    if change is None:
        return before
    known = ({} if change.cleared else before) | change.names
    return {name: parent for name, parent in known.items() if parent is not None}


def test_nobody_is_told_who_does_not_watch() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.index(block, b"name", b"parent")
    assert pool.take_changes() is None
    assert pool.watch() == (True, {b"name": b"parent"})
    assert pool.take_changes() is None
    pool.drop([block])
    pool.forget_free()
    assert pool.take_changes() == (True, {})
    pool.forget_free()
    assert pool.take_changes() is None


@pytest.mark.parametrize("num_blocks", [100, 10_000])
def test_taking_a_block_out_of_the_queue_looks_at_no_other(num_blocks: int) -> None:
    """Counts reads and writes of the ring, which a search through it would make many."""
    pool = BlockPool(num_blocks)
    blocks = pool.take(num_blocks)
    for block in blocks:
        pool.index(block, block.to_bytes(4, "big"))
    pool.drop(blocks)
    counted = Counted(pool._after)
    pool._after = counted
    pool.hold(num_blocks // 2)
    pool.drop([num_blocks // 2])
    assert counted.touched <= 6


class Counted(list[int]):
    """A list that counts how often it is asked."""

    touched = 0

    def __getitem__(self, at: Any) -> Any:
        self.touched += 1
        return super().__getitem__(at)

    def __setitem__(self, at: Any, value: Any) -> None:
        self.touched += 1
        super().__setitem__(at, value)
