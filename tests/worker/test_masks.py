"""Grammar masks: their frames, the wait for them, and sampling under them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from protos import worker_pb2
from services.common.errors import InvalidArgument
from services.worker import wire
from services.worker.masks import MaskInbox, MasksLost, wait
from services.worker.sampling.feature import Position
from services.worker.sampling.sampler import Sampler
from services.worker.step import MASKED, ROW_DROPPED, ROW_NO_TOKEN, ROW_OK, SAMPLES
from tests.worker.columns import frame, ints, new_row, pack, packed, request, run, step, unpack
from tests.worker.harness import Stream, Worker, serving, simulated, texts
from tests.worker.tiny_llama import PROMPT, VOCAB_SIZE, runner_of, tiny_llama

WAITS = SAMPLES | MASKED
LETTERS = range(ord("a"), ord("z") + 1)


def masks(step_id: int, rows: dict[int, Any], vocab_size: int = VOCAB_SIZE) -> Any:
    """A frame with the allowed ids of each row, one list per position; None drops the row."""
    given = [packed(*allowed, vocab_size=vocab_size).tobytes() for allowed in rows.values() if allowed is not None]
    return worker_pb2.StepMasks(
        step_id=step_id,
        row_i32le=pack(*rows),
        drop_u8=bytes(allowed is None for allowed in rows.values()),
        mask_u32le=b"".join(given),
    )


class TestFrames:
    def decoded(self, message: Any, vocab_size: int = 40) -> Any:
        given = step(
            7, [(2, 3, 1), (0, 3, 3), (1, 3, 1), (3, 3, 1)], flags=[WAITS, WAITS, 1, WAITS], drafts={0: [4, 5]}
        )
        return wire.decode_masks(message, given, vocab_size)

    def test_whole_masks_by_row_and_position(self) -> None:
        found = self.decoded(masks(7, {0: [[1], [2, 39], []], 3: None, 2: [[0]]}, 40))
        assert found.keys() == {0, 2, 3}
        assert found[3] is None
        bits = [np.unpackbits(found[row], axis=1, bitorder="little") for row in (0, 2)]
        assert [[np.flatnonzero(one).tolist() for one in row] for row in bits] == [[[1], [2, 39], []], [[0]]]

    @pytest.mark.parametrize(
        ("field", "change"),
        [
            ("masks.row_i32le", {"row_i32le": pack(0, 3)}),
            ("masks.row_i32le", {"row_i32le": pack(0, 3, 1)}),
            ("masks.row_i32le", {"row_i32le": pack(0, 3, 9)}),
            ("masks.row_i32le", {"row_i32le": pack(0, 3, 3)}),
            ("masks.row_i32le", {"row_i32le": b"\0"}),
            ("masks.drop_u8", {"drop_u8": b"\0\0"}),
            ("masks.drop_u8", {"drop_u8": b"\0\2\0"}),
            ("masks.mask_u32le", {"mask_u32le": b"\0" * 39}),
            ("masks.mask_u32le", {"mask_u32le": b"\0" * 48}),
            ("masks.mask_u32le", {"drop_u8": b"\1\0\0"}),
        ],
    )
    def test_a_malformed_column_is_named(self, field: str, change: dict[str, bytes]) -> None:
        message = masks(7, {0: [[1], [2], [3]], 3: [[4]], 2: [[5]]}, 40)
        for name, value in change.items():
            setattr(message, name, value)
        with pytest.raises(InvalidArgument) as caught:
            self.decoded(message)
        assert caught.value.field == field

    def test_only_a_flagged_step_waits(self) -> None:
        assert wire.waits_for_masks(frame(1, [(0, 0, 1)], flags=WAITS))
        assert not wire.waits_for_masks(frame(1, [(0, 0, 1)]))
        assert not wire.waits_for_masks(frame(1))


class TestInbox:
    def test_whoever_comes_first(self) -> None:
        inbox: MaskInbox[str] = MaskInbox()
        first, second = inbox.expect(1), inbox.expect(2)
        inbox.give(1, "one")
        assert wait(first) == "one"
        found: list[str] = []
        waiter = threading.Thread(target=lambda: found.append(wait(second)))
        waiter.start()
        inbox.give(2, "two")
        waiter.join()
        assert found == ["two"]

    @pytest.mark.parametrize("step_id", [1, 3])
    def test_masks_that_nobody_waits_for_are_refused(self, step_id: int) -> None:
        inbox: MaskInbox[str] = MaskInbox()
        inbox.expect(1)
        inbox.give(1, "one")
        with pytest.raises(InvalidArgument, match=f"step_id {step_id}"):
            inbox.give(step_id, "again")

    def test_later_masks_and_a_new_beginning_end_older_waits(self) -> None:
        inbox: MaskInbox[str] = MaskInbox()
        first, second, third = (inbox.expect(number) for number in (1, 2, 3))
        inbox.give(2, "two")
        inbox.expire(4)
        for lost in (first, third):
            with pytest.raises(InvalidArgument, match="did not come"):
                wait(lost)
        assert wait(second) == "two"

    def test_once_closed_nobody_waits(self) -> None:
        inbox: MaskInbox[str] = MaskInbox()
        before = inbox.expect(1)
        inbox.close()
        for lost in (before, inbox.expect(2)):
            with pytest.raises(MasksLost):
                wait(lost)


class TestSampler:
    def sample(self, allowed: list[int], tokens: list[int] | None = None, **sampling: Any) -> Any:
        sampler = Sampler(VOCAB_SIZE, torch.device("cpu"))
        ids = tokens or [1, 2, 3]
        sampler.add(request(0, ids, 2, **sampling))
        logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
        mask = packed(allowed, vocab_size=VOCAB_SIZE)[0]
        return sampler.sample(logits, [Position(0, ints(*ids), mask=mask)])[0]

    @pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 4}, {"seed": 9, "top_p": 0.7, "top_k": 20}])
    def test_a_mask_is_the_first_of_all_operations(self, sampling: dict[str, Any]) -> None:
        """Like a list of allowed ids, which is the next one."""
        allowed = [5, 9, 77, 200, 258]
        everything = list(range(VOCAB_SIZE))
        assert self.sample(allowed, **sampling) == self.sample(everything, allowed_ids=tuple(allowed), **sampling)
        both = self.sample(allowed, allowed_ids=(9, 200, 3), **sampling)
        assert both == self.sample(everything, allowed_ids=(9, 200), **sampling)

    def test_log_probabilities_come_from_the_raw_logits(self) -> None:
        free = self.sample(list(range(VOCAB_SIZE)), temperature=0, logprobs=3)
        bound = self.sample([17], temperature=0, logprobs=3)
        assert bound.token == 17
        assert bound.logprobs[1:] == free.logprobs[1:]
        assert bound.logprobs[0].rank > 3

    def test_no_token_left(self) -> None:
        assert self.sample([], temperature=0).status == ROW_NO_TOKEN
        assert self.sample([5], allowed_ids=(6,)).status == ROW_NO_TOKEN

    def test_an_end_before_min_tokens_where_the_grammar_allows_nothing_else(self) -> None:
        end = {"eos_ids": (7,), "min_tokens": 9, "temperature": 0}
        assert self.sample([7], **end).token == 7
        assert self.sample([7, 8], **end).token == 8
        assert self.sample([7, 8], banned_sequences=((8,),), **end).token == 7


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("models") / "tiny"))


class TestTorchRunner:
    def test_rows_with_masks_beside_rows_without_and_dropped_ones(self, model_path: str) -> None:
        runner = runner_of(model_path)
        sampling = {"seed": 3, "logprobs": 0}
        new = [request(row, PROMPT, **sampling) for row in range(3)]
        new.append(request(3, PROMPT, allowed_ids=tuple(range(40)), **sampling))
        called: list[int] = []

        def given() -> Any:
            called.append(1)
            return {0: packed(range(40), vocab_size=VOCAB_SIZE), 2: None}

        flags = [WAITS, SAMPLES, WAITS, SAMPLES]
        blocks = {row: range(16 * row, 16 * row + 16) for row in range(4)}
        output = run(runner, step(0, [(row, 0, 11) for row in range(4)], new, blocks=blocks, flags=flags), given)
        assert called == [1]
        assert [result.status for result in output.results] == [ROW_OK, ROW_OK, ROW_DROPPED, ROW_OK]
        masked, free, dropped, allowed = output.results
        assert (masked.token_ids, masked.logprobs) == (allowed.token_ids, allowed.logprobs)
        assert masked.token_ids != free.token_ids
        assert dropped.token_ids == ()
        again = run(runner, step(1, [(2, 10, 1)]))  # a dropped row has its known ids as before
        assert again.results[0].token_ids == free.token_ids

    def test_one_mask_per_draft(self, model_path: str) -> None:
        runner = runner_of(model_path)
        right = run(runner, step(0, [(0, 0, 11)], [request(0, PROMPT, temperature=0)])).results[0].token_ids[0]
        run(runner, step(0, [(1, 0, 11)], [request(1, PROMPT, temperature=0)]))
        sets = [[5], [6], [7, 8], [9]]
        given = packed(*sets, vocab_size=VOCAB_SIZE)
        output = run(runner, step(1, [(1, 11, 4)], drafts={1: [5, 6, 8]}, flags=[WAITS]), lambda: {1: given})
        tokens = output.results[0].token_ids
        assert tokens[:2] == (5, 6)
        assert tokens in ((5, 6, 7), (5, 6, 8, 9))
        output = run(runner, step(1, [(0, 11, 4)], drafts={0: [right, 6, 8]}, flags=[WAITS]), lambda: {0: given})
        assert output.results[0].token_ids == (5,)

    def test_a_mask_that_leaves_nothing_ends_the_answer_before_it(self, model_path: str) -> None:
        runner = runner_of(model_path)
        run(runner, step(0, [(1, 0, 11)], [request(1, PROMPT, temperature=0)]))
        given = packed([5], [], vocab_size=VOCAB_SIZE)
        output = run(runner, step(1, [(1, 11, 2)], drafts={1: [5]}, flags=[WAITS]), lambda: {1: given})
        assert (output.results[0].status, output.results[0].token_ids) == (ROW_OK, (5,))
        output = run(runner, step(2, [(1, 12, 1)], flags=[WAITS]), lambda: {1: given[1:]})
        assert output.results[0].status == ROW_NO_TOKEN


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    script = tmp_path / "script.json"
    script.write_text(
        json.dumps({"requests": [{"contains": "hang", "hang_at": 0, "text": "x"}], "otherwise": {"text": "hello"}})
    )
    runner = simulated(script)
    async with serving(runner, tmp_path) as standing:
        standing.release = runner.release  # type: ignore[attr-defined]
        await standing.prepare()
        yield standing
        runner.release()


async def status_of_end(stream: Stream) -> grpc.StatusCode:
    while True:
        try:
            assert await stream.call.read() is not grpc.aio.EOF
        except grpc.aio.AioRpcError as error:
            return error.code()


class TestStream:
    async def begin(self, stream: Stream, *, hang: bool = False) -> None:
        """A step that waits for the masks of its two rows, behind another one."""
        await stream.send(step=frame(1, [(3, 0, 4)], [new_row(3, b"hang" if hang else b"free")]))
        if not hang:
            assert (await stream.result()).status == worker_pb2.STEP_STATUS_OK
        rows = [(0, 0, 2), (1, 0, 2)]
        await stream.send(step=frame(2, rows, [new_row(0, b"ab", 5), new_row(1, b"ab", 6)], flags=WAITS))

    async def test_masks_before_and_after_the_forward_pass(self, worker: Worker) -> None:
        stream = await worker.open()
        await self.begin(stream, hang=True)
        await stream.send(masks=masks(2, {1: [LETTERS], 0: None}))
        await stream.send(step=frame(3, [(1, 2, 1)], flags=WAITS))
        worker.release()  # type: ignore[attr-defined]
        assert texts([await stream.result()]) == b"x"
        second = await stream.result()
        assert (unpack(second.row_i32le), second.row_status_u8) == ([0, 1], bytes([ROW_DROPPED, ROW_OK]))
        assert texts([second]) == b"h"
        await stream.send(masks=masks(3, {1: [[ord("z"), ord("m")]]}))
        assert texts([await stream.result()]) == b"m"  # not the script's letter: the lowest allowed

    async def test_a_step_waits_as_long_as_it_takes(self, worker: Worker) -> None:
        stream = await worker.open()
        await self.begin(stream)
        answer = asyncio.ensure_future(stream.result())
        for _ in range(5):
            await stream.send(heartbeat=worker_pb2.ExecuteHeartbeat())
            assert (await worker.stub.Health(worker_pb2.WorkerServiceHealthRequest())).steps == 1
        assert not answer.done()
        await stream.send(masks=masks(2, {0: [[]], 1: [LETTERS]}))
        result = await answer
        assert result.row_status_u8 == bytes([ROW_NO_TOKEN, ROW_OK])

    async def test_malformed_masks_fail_their_step(self, worker: Worker) -> None:
        stream = await worker.open()
        await self.begin(stream)
        await stream.send(masks=masks(2, {0: [LETTERS]}))
        failed = await stream.result()
        assert (failed.status, failed.failure.code) == (worker_pb2.STEP_STATUS_FAILED, 3)
        assert (failed.failure.field, "lacks row 1" in failed.failure.message) == ("masks.row_i32le", True)
        begun = frame(3, [(0, 0, 2)], [new_row(0, b"ab", 7)], freed=[0, 1], resync=True)
        assert texts([await stream.run(begun)]) == b"h"

    async def test_masks_of_a_skipped_step_may_still_come(self, worker: Worker) -> None:
        stream = await worker.open()
        bad = frame(1, [(0, 0, 2)], [new_row(0, b"ab")])
        bad.num_tokens_i32le = b""
        assert (await stream.run(bad)).status == worker_pb2.STEP_STATUS_FAILED
        assert (await stream.run(frame(2, [(0, 0, 2)], flags=WAITS))).status == worker_pb2.STEP_STATUS_SKIPPED
        await stream.send(masks=masks(2, {0: [LETTERS]}))
        good = frame(3, [(0, 0, 2)], [new_row(0, b"ab")], resync=True)
        assert texts([await stream.run(good)]) == b"h"

    @pytest.mark.parametrize(
        "wrong",
        [lambda: masks(1, {3: [LETTERS]}), lambda: masks(9, {0: [LETTERS]})],
        ids=["a step that does not wait", "an unknown step"],
    )
    async def test_masks_that_belong_to_no_wait_end_the_stream(self, worker: Worker, wrong: Callable[[], Any]) -> None:
        stream = await worker.open()
        await self.begin(stream)
        await stream.send(masks=wrong())
        assert await status_of_end(stream) == grpc.StatusCode.INVALID_ARGUMENT
        await self.goes_on(worker)

    async def goes_on(self, worker: Worker) -> None:
        again = await worker.open()
        assert texts([await again.run(frame(1, [(0, 0, 2)], [new_row(0, b"ab")]))]) == b"h"

    async def test_a_stream_that_ends_releases_the_step(self, worker: Worker) -> None:
        """The engine hangs up, closes its side, goes silent, or comes back on another stream."""
        stream = await worker.open()
        await self.begin(stream)
        stream.call.cancel()
        await self.goes_on(worker)
        stream = await worker.open()
        await self.begin(stream)
        await stream.call.done_writing()
        assert (await stream.result()).status == worker_pb2.STEP_STATUS_SKIPPED
        assert await stream.call.read() is grpc.aio.EOF
        await self.goes_on(worker)
        stream = await worker.open(lease_ms=50)
        await stream.send(step=frame(2, [(0, 0, 2)], [new_row(0, b"ab", 5)], flags=WAITS))
        assert await status_of_end(stream) == grpc.StatusCode.DEADLINE_EXCEEDED
        await self.goes_on(worker)
        stream = await worker.open()
        await self.begin(stream)
        await self.goes_on(worker)
        assert await status_of_end(stream) == grpc.StatusCode.ABORTED

    async def test_a_request_at_fault_needs_no_mask(self, worker: Worker) -> None:
        """Its row fails alone, and the masks that come for it anyway fit."""
        stream = await worker.open()
        await stream.send(step=frame(1, [(0, 0, 1)], [new_row(0, [5], temperature=-1.0)], flags=WAITS))
        assert (await stream.result()).row_status_u8 == b"\3"
        await stream.send(masks=masks(1, {0: [LETTERS]}))
        assert texts([await stream.run(frame(2, [(1, 0, 2)], [new_row(1, b"ab")]))]) == b"h"
