"""An engine that gives every request one token per step, at a steady pace: the load for tests.bench.gateway.

python -m tests.bench.steady_engine --port 50052 --hz 50

It serves the byte-level model of the tests with a long context. Only plain requests: one choice, no logprobs.
"""

from __future__ import annotations

import argparse
import asyncio
from array import array

from protos import common_pb2, engine_pb2
from services.common.server import tune_interpreter, wait_for_signal
from tests.gateway.fake_engine import FakeEngine

CONTEXT = 1 << 20
_TEXT = b"It scatters most at short wavelengths, and so the sky is blue. "


class SteadyEngine(FakeEngine):
    """Steps at absolute times, so that a slow one is made up for."""

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self.step_s, loop.time() - 1.0)
            await asyncio.sleep(max(0.0, due - loop.time()))
            if self.live:
                self.step()

    def step(self) -> None:
        """One token for every request; the last one says LENGTH."""
        self.step_number += 1
        handles, firsts, ids, finishes = array("I"), array("I"), array("i"), bytearray()
        started = []
        for handle, running in list(self.live.items()):
            first = running.sent[0]
            if not first:
                started.append(engine_pb2.Started(handle=handle, cached_tokens=0))
            handles.append(handle)
            firsts.append(first)
            ids.append(_TEXT[first % len(_TEXT)])
            running.sent[0] = first + 1
            done = first + 1 >= running.submit.sampling.max_tokens
            finishes.append(4 if done else 0)
            if done:
                del self.live[handle]
        outputs = engine_pb2.StepOutputs(
            step_id=self.step_number,
            handle_u32le=handles.tobytes(),
            choice_u32le=bytes(4 * len(handles)),
            first_index_u32le=firsts.tobytes(),
            token_count_u32le=array("I", [1] * len(handles)).tobytes(),
            token_id_i32le=ids.tobytes(),
            finish_u8=bytes(finishes),
            started=started,
        )
        self.send(engine_pb2.AttachResponse(outputs=outputs, load=common_pb2.Load(running=len(self.live))))


async def main() -> None:
    """Serves until a signal."""
    parser = argparse.ArgumentParser(prog="tests.bench.steady_engine", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--hz", type=float, required=True)
    given = parser.parse_args()
    tune_interpreter()
    engine = SteadyEngine(step_s=1 / given.hz, port=given.port, context=CONTEXT)
    await engine.start()
    await wait_for_signal()
    await engine.kill()


if __name__ == "__main__":
    asyncio.run(main())
