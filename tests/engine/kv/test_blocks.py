"""The block pool against a plain list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.engine.kv.blocks import BlockPool


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


def test_of_two_blocks_with_one_content_the_first_is_found_until_it_is_given_out() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.index(first, b"same")
    pool.index(second, b"same")
    assert pool.find(b"same") == first
    assert pool.num_indexed == 1
    pool.drop([first])
    assert pool.take(1) == [first]
    assert pool.find(b"same") is None
    assert pool.names == [None, None]


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


@given(st.lists(st.tuples(st.sampled_from(["take", "hold", "drop", "name"]), st.integers(0, 7)), max_size=60))
def test_the_queue_is_the_one_that_a_list_would_be(calls: list[tuple[str, int]]) -> None:
    pool, queue, refs, names = BlockPool(8), list(range(8)), [0] * 8, dict[int, bytes]()
    for verb, number in calls:
        if verb == "take" and number <= len(queue):
            taken, queue = queue[:number], queue[number:]
            assert pool.take(number) == taken
            for block in taken:
                refs[block] = 1
                names.pop(block, None)
        elif verb == "hold" and (refs[number] or number in names):
            pool.hold(number)
            if refs[number] == 0:
                queue.remove(number)
            refs[number] += 1
        elif verb == "drop" and refs[number]:
            pool.drop([number])
            refs[number] -= 1
            if refs[number] == 0:
                queue.insert(len(queue) if number in names else 0, number)
        elif verb == "name" and refs[number] and number not in names:
            pool.index(number, bytes([number]))
            names[number] = bytes([number])
        assert pool.free_blocks() == queue
        assert pool.num_free == len(queue)
        assert pool.refs == refs
        assert [pool.find(bytes([block])) for block in range(8)] == [
            block if block in names else None for block in range(8)
        ]
