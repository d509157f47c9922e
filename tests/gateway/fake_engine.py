"""An EngineService over real gRPC whose answers a test scripts, and the byte-level model it serves.

Every byte is a token (id = byte), then come the special tokens. So expected texts can be computed
by hand, and a character of several bytes is split over tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import struct
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc.aio
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from protos import common_pb2, engine_pb2, engine_pb2_grpc
from services.common.errors import Unavailable
from services.common.server import Server

START, END = 256, 257
VOCAB = 258
CONTEXT = 512
_IDLE_S = 0.001  # between looks for something to do; a loop that never waits would slow the gateway beside it
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Returns once the condition holds; a failure says which one never did."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "waited in vain"
        await asyncio.sleep(0.005)


def _tokenizer_json() -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in printable}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in names):
        names[byte] = chr(256 + offset)
    assert sorted(names.values()) == alphabet
    tokenizer = Tokenizer(models.BPE(vocab={names[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    return tokenizer.to_str()


def text_files() -> dict[str, bytes]:
    """The text files of the byte model."""
    return {
        "tokenizer.json": _tokenizer_json().encode(),
        "config.json": json.dumps(
            {"model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "eos_token_id": END}
        ).encode(),
        "generation_config.json": json.dumps({"eos_token_id": END}).encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}).encode(),
    }


@dataclass
class Running:
    """A request inside the fake."""

    submit: engine_pb2.Submit
    scripts: list[list[int]]
    sent: list[int]
    finished: list[bool]
    started: bool = False


def vector_of(submit: engine_pb2.Submit) -> list[float]:
    """A vector of length 1 that the prompt's ids fix."""
    ids = array("i", submit.prompt_id_i32le)
    values = [1.0 + sum(token * (place + 3) % 17 for token in ids) for place in range(8)]
    return array("f", [value / math.hypot(*values) for value in values]).tolist()


Script = Callable[[engine_pb2.Submit, int], list[int]]


@dataclass
class FakeEngine:
    """Gives each choice its script, one token a step; after the script comes END, or LENGTH."""

    script: Script = lambda submit, choice: list(b"hello world")
    step_s: float = 0.0
    per_step: int = 1
    held: bool = False
    """No step while it is set."""
    refuse: common_pb2.Failure | None = None
    vector: Callable[[engine_pb2.Submit], list[float]] = vector_of
    capabilities: tuple[str, ...] = ("generate", "prompt_logprobs", "embed")
    incarnation: int = 1
    model: str = "bytes"
    context: int = CONTEXT
    vocab_size: int = VOCAB
    ready: bool = True
    files: dict[str, bytes] = field(default_factory=text_files)
    submits: list[engine_pb2.Submit] = field(default_factory=list)
    aborts: list[engine_pb2.AbortRows] = field(default_factory=list)
    blob_addresses: list[str] = field(default_factory=list)
    file_requests: list[list[str]] = field(default_factory=list)
    live: dict[int, Running] = field(default_factory=dict)
    port: int = 0
    server: Server | None = None
    _outboxes: list[asyncio.Queue[engine_pb2.AttachResponse | None]] = field(default_factory=list)
    _steps: asyncio.Task[None] | None = None
    step_number: int = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listens, on the same port as before after a stop."""
        self.server = Server([f"127.0.0.1:{self.port}"])
        self.port = self.server.ports[0]
        engine_pb2_grpc.add_EngineServiceServicer_to_server(Servicer(self), self.server.grpc)
        await self.server.start("triptych.v1.EngineService")
        await self.server.set_ready(True)
        self._steps = asyncio.create_task(self._run())

    async def kill(self) -> None:
        """Ends at once; all requests are forgotten, and the next life has another incarnation."""
        assert self.server is not None
        assert self._steps is not None
        self._steps.cancel()
        await self.server.stop(0)
        self.live.clear()
        self._outboxes.clear()
        self.incarnation += 1

    def send(self, frame: engine_pb2.AttachResponse) -> None:
        """A frame to every gateway."""
        for outbox in self._outboxes:
            outbox.put_nowait(frame)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.step_s if self._runs else _IDLE_S)
            if self._runs:
                self.step()

    @property
    def _runs(self) -> bool:
        return bool(self.live) and not self.held

    def step(self) -> None:
        """One step for all requests."""
        self.step_number += 1
        handles, choices, firsts, counts, ids = (array("I") for _ in range(5))
        finishes = bytearray()
        started = []
        logprobs: list[tuple[int, ...]] = []
        asked = False
        pooled = []
        for handle, running in list(self.live.items()):
            if not running.started:
                running.started = True
                started.append(engine_pb2.Started(handle=handle, cached_tokens=0))
            if running.submit.HasField("pooling"):
                values = array("f", self.vector(running.submit)).tobytes()
                pooled.append(engine_pb2.PooledOutput(handle=handle, values_f32le=values))
                del self.live[handle]
                continue
            params = running.submit.sampling
            for choice, script in enumerate(running.scripts):
                if running.finished[choice]:
                    continue
                first = running.sent[choice]
                left = params.max_tokens - first
                new = [*script, END][first : first + min(self.per_step, left)]
                finish = 0
                if new and new[-1] in params.eos_token_ids:
                    finish = 1
                elif new and new[-1] in params.stop_token_ids:
                    finish = 2
                elif first + len(new) >= params.max_tokens:
                    finish = 4
                handles.append(handle)
                choices.append(choice)
                firsts.append(first)
                counts.append(len(new))
                ids.extend(new)
                finishes.append(finish)
                running.sent[choice] += len(new)
                running.finished[choice] = bool(finish)
                asked |= params.HasField("logprobs")
                logprobs += [(params.logprobs if params.HasField("logprobs") else -1, token) for token in new]
            if all(running.finished):
                del self.live[handle]
        outputs = engine_pb2.StepOutputs(
            step_id=self.step_number,
            handle_u32le=handles.tobytes(),
            choice_u32le=choices.tobytes(),
            first_index_u32le=firsts.tobytes(),
            token_count_u32le=counts.tobytes(),
            token_id_i32le=ids.tobytes(),
            finish_u8=bytes(finishes),
            started=started,
            pooled=pooled,
        )
        if asked:
            outputs.logprobs.CopyFrom(_logprobs(logprobs))
        self.send(engine_pb2.AttachResponse(outputs=outputs, load=common_pb2.Load(running=len(self.live))))

    def take(self, submit: engine_pb2.Submit) -> None:
        """A request came in."""
        self.submits.append(submit)
        if self.refuse is not None:
            self.send(
                engine_pb2.AttachResponse(rejected=engine_pb2.Rejected(handle=submit.handle, failure=self.refuse))
            )
            return
        n = submit.sampling.n
        replay = [(len(entry.token_id_i32le) // 4, bool(entry.finish_reason)) for entry in submit.replay]
        self.live[submit.handle] = Running(
            submit,
            [self.script(submit, choice) for choice in range(n)],
            [count for count, _ in replay] or [0] * n,
            [done for _, done in replay] or [False] * n,
        )

    def abort(self, abort: engine_pb2.AbortRows) -> None:
        """An abort came in."""
        self.aborts.append(abort)
        running = self.live.get(abort.handle)
        if running is None:
            return
        if abort.HasField("choice"):
            running.finished[abort.choice] = True
        if not abort.HasField("choice") or all(running.finished):
            del self.live[abort.handle]


def _logprobs(positions: list[tuple[int, ...]]) -> common_pb2.Logprobs:
    """The sampled token at -0.5 rank 1, then itself and its neighbours, the last of them impossible."""
    counts, ids, ranks = array("i"), array("i"), array("i")
    values = array("f")
    for wanted, token in positions:
        counts.append(wanted + 1)
        for place in range(wanted + 1):
            ids.append(token if place < 2 else (token + place - 1) % 256)
            ranks.append(max(1, place))
            values.append(float("-inf") if place == 3 else -0.5 * max(1, place))
    return common_pb2.Logprobs(
        count_i32le=counts.tobytes(),
        token_id_i32le=ids.tobytes(),
        logprob_f32le=struct.pack(f"<{len(values)}f", *values),
        rank_i32le=ranks.tobytes(),
    )


class Servicer(engine_pb2_grpc.EngineServiceServicer):
    def __init__(self, fake: FakeEngine) -> None:
        self.fake = fake

    def _infos(self) -> list[common_pb2.TextFileInfo]:
        return [
            common_pb2.TextFileInfo(name=name, size=len(data), sha256=hashlib.sha256(data).digest())
            for name, data in self.fake.files.items()
        ]

    async def Hello(self, request, context):
        if not self.fake.ready:
            raise Unavailable("the worker is not there yet")
        digest = hashlib.sha256(b"".join(self.fake.files.values())).hexdigest()
        return engine_pb2.EngineServiceHelloResponse(
            engine=common_pb2.Peer(
                role="engine", name="fake", incarnation=self.fake.incarnation, contract_min=1, contract_max=1
            ),
            model=common_pb2.ModelInfo(
                name=self.fake.model,
                architecture="llama",
                vocab_size=self.fake.vocab_size,
                max_model_len=self.fake.context * 2,
                fingerprint=digest,
                dtype="float32",
                capabilities=self.fake.capabilities,
                created_s=1_700_000_000,
            ),
            limits=engine_pb2.EngineLimits(max_model_len=self.fake.context, block_size=16, max_num_seqs=64, max_n=8),
            text_files=self._infos(),
        )

    async def GetTextFiles(self, request, context):
        self.fake.file_requests.append(list(request.names))
        for info in self._infos():
            if info.name in request.names or not request.names:
                data = self.fake.files[info.name]
                for offset in range(0, len(data), 5000):
                    chunk = common_pb2.TextFileChunk(file=info, offset=offset, data=data[offset : offset + 5000])
                    yield engine_pb2.EngineServiceGetTextFilesResponse(chunk=chunk)

    async def Attach(self, requests: AsyncIterator[engine_pb2.AttachRequest], context):
        outbox: asyncio.Queue[engine_pb2.AttachResponse | None] = asyncio.Queue()
        first = await anext(aiter(requests))
        assert first.HasField("hello")
        self.fake.blob_addresses.append(first.hello.blob_address)
        self.fake._outboxes.append(outbox)
        reader = asyncio.create_task(self._read(requests))
        try:
            peer = common_pb2.Peer(role="engine", name="fake", incarnation=self.fake.incarnation)
            yield engine_pb2.AttachResponse(welcome=engine_pb2.AttachWelcome(engine=peer, heartbeat_ms=1000))
            while (frame := await outbox.get()) is not None:
                yield frame
        finally:
            reader.cancel()
            if outbox in self.fake._outboxes:
                self.fake._outboxes.remove(outbox)

    async def _read(self, requests: AsyncIterator[engine_pb2.AttachRequest]) -> None:
        try:
            async for frame in requests:
                if frame.HasField("submit"):
                    self.fake.take(frame.submit)
                elif frame.HasField("abort"):
                    self.fake.abort(frame.abort)
        except grpc.aio.AioRpcError:
            return

    async def Explain(self, request, context):
        for running in self.fake.live.values():
            if running.submit.token == request.token:
                return engine_pb2.EngineServiceExplainResponse(state="running", reason="it has a row")
        from services.common.errors import NotFound

        raise NotFound("no request of that token")
