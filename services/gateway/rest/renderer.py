"""The OpenAI API over this process's own front: bodies in, JSON documents or events out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import orjson

from services.common import tracing
from services.common.errors import InvalidArgument, TriptychError
from services.gateway.fields import Api, read_fields
from services.gateway.front import Front, Running
from services.gateway.json_text import read_json
from services.gateway.models import Model
from services.gateway.request import Delta, Usage
from services.gateway.rest import embeddings
from services.gateway.rest.chat_documents import Chat
from services.gateway.rest.completion_documents import Completion
from services.gateway.rest.documents import Documents, Head, Prompt, Shown
from services.gateway.rest.merge import Merge, Numbered
from services.gateway.rest.reply import SSE, Outlet, Reply
from services.gateway.rest.responses.answer import About, Answer
from services.gateway.rest.responses.items import read_input
from services.gateway.text import Envelope, Job
from services.gateway.trace import TRACEPARENT, request_id_of

Body = dict[str, Any]
_LONG = 32 * 1024
"""Bytes of a body from which on a thread reads it."""


def parse(body: bytes) -> Body:
    """A JSON object. NaN, Infinity, numbers beyond a double and twin keys are refused by their places."""
    value = read_json(body)
    if not isinstance(value, dict):
        raise InvalidArgument("body: must be a JSON object", field="body")
    return value


def _envelope(headers: Mapping[str, str]) -> Envelope:
    return Envelope(request_id_of(headers), tracing.child(headers.get(TRACEPARENT)))


class _Stream:
    """The events of a streamed answer. The first deltas are there already, so that refusals were raised before."""

    def __init__(self, first: Numbered, deltas: Merge, documents: Documents, runs: Sequence[Running]) -> None:
        self._runs = runs
        self._deltas = deltas
        self._documents = documents
        self._opening = documents.first() + self._chunks(first) if first else b""
        self._over = False

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> bytes:
        if self._over:
            raise StopAsyncIteration
        if self._opening:
            opening, self._opening = self._opening, b""
            return opening
        try:
            if news := await self._deltas.read():
                return self._chunks(news)
            ending = self._documents.last()
        except TriptychError as error:
            ending = self._documents.failed(error)
        self._over = True
        return ending

    def _chunks(self, news: Numbered) -> bytes:
        chunk = self._documents.chunk
        return b"".join([chunk(number, delta) for number, delta in news])

    async def pour(self, outlet: Outlet) -> None:
        """All events of an answer with one request behind it."""
        chunk, write, (run,) = self._documents.chunk, outlet.write, self._runs

        def tell(deltas: Sequence[Delta]) -> bool:
            return write(chunk(0, deltas[0]) if len(deltas) == 1 else self._chunks([(0, delta) for delta in deltas]))

        write(self._opening)
        try:
            while not run.over:
                await outlet.drained()
                await run.feed(tell)
            write(self._documents.last())
        except TriptychError as error:
            write(self._documents.failed(error))

    async def aclose(self) -> None:
        """Ends the request where it runs."""
        await self._deltas.close()


class Renderer:
    """Answers the operations of the API."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._one_at_a_time = asyncio.Semaphore(1)
        self._operations: dict[str, Callable[[bytes, Mapping[str, str]], Awaitable[Reply]]] = {
            "chat_completions": self._chat,
            "completions": self._completions,
            "responses": self._responses,
            "embeddings": self._embeddings,
            "models": self._models,
            "model": self._model,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
        }

    async def call(self, operation: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Answers one request."""
        return await self._operations[operation](body, headers)

    async def _parsed(self, body: bytes) -> Body:
        """The same as `parse`. Long ones are read in a thread, since many may come at once (64 of 150 kB took 30 ms),
        and one after another: threads that want the interpreter hold up the event loop too.
        """
        if len(body) <= _LONG:
            return parse(body)
        async with self._one_at_a_time:
            return await asyncio.to_thread(parse, body)

    async def obstacle(self) -> str | None:
        """What keeps requests from being served, or None."""
        return self._front.obstacle()

    def _model_of(self, body: Body) -> Model:
        name = body.get("model")
        return self._front.models.get(name if isinstance(name, str) and name else None)

    async def _chat(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        arrived = time.monotonic()
        values = await self._parsed(body)
        model = self._model_of(values)
        envelope = _envelope(headers)
        with self._front.arrival():
            job = await model.text.chat(values, envelope)
        running = self._front.start(model, job, arrived=arrived)
        head = Head(f"chatcmpl-{job.spec.request_id}", running.created_s, model.info.name)
        prompt = Prompt(job.spec.prompt_ids, running.prompt_logprobs)
        shown = _shown(model, job, lambda: running.usage)
        documents = Chat(head, shown, prompt, job.spec.sampling.n)
        if job.response.stream:
            return await _streamed([running], documents)
        return Reply(documents.whole(await running.whole()))

    async def _completions(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        arrived = time.monotonic()
        values = await self._parsed(body)
        model = self._model_of(values)
        envelope = _envelope(headers)
        with self._front.arrival():
            jobs = await model.text.completions(values, envelope)
        runs = self._start_all(model, jobs, arrived)
        response, spec = jobs[0].response, jobs[0].spec
        head = Head(f"cmpl-{spec.request_id}", runs[0].created_s, model.info.name)
        shown = _shown(model, jobs[0], lambda: _sum(runs))
        prompts = [Prompt(run.spec.prompt_ids, run.prompt_logprobs) for run in runs]
        documents = Completion(head, shown, prompts, spec.sampling.n)
        if response.stream:
            return await _streamed(runs, documents)
        return Reply(documents.whole(await _gather(runs)))

    async def _responses(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        arrived = time.monotonic()
        values = await self._parsed(body)
        model = self._model_of(values)
        envelope = _envelope(headers)
        with self._front.arrival():
            asked = read_fields(values, Api.RESPONSES)
            job = await model.text.respond(asked, read_input(asked.input, asked.instructions), envelope)
        running = self._front.start(model, job, arrived=arrived)
        about = About(job.spec.request_id, model.info.name, running.created_s, asked, job.spec.sampling)
        shown = _shown(model, job, lambda: running.usage)
        answer = Answer(about, shown)
        if job.response.stream:
            return await _streamed([running], answer)
        return Reply(answer.whole(await running.whole()))

    def _start_all(self, model: Model, jobs: Sequence[Job], arrived: float) -> list[Running]:
        runs: list[Running] = []
        try:
            runs += [self._front.start(model, job, arrived=arrived) for job in jobs]
        except TriptychError:
            for run in runs:
                run.close()
            raise
        return runs

    async def _embeddings(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        arrived = time.monotonic()
        values = await self._parsed(body)
        model = self._model_of(values)
        return Reply(await embeddings.answer(self._front, model, values, _envelope(headers), arrived=arrived))

    async def _models(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        del body, headers
        cards = [_card(model) for model in self._front.models.all()]
        return Reply(orjson.dumps({"object": "list", "data": cards}))

    async def _model(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        del headers
        return Reply(orjson.dumps(_card(self._front.models.get(body.decode()))))

    async def _tokenize(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        del headers
        values = await self._parsed(body)
        model = self._model_of(values)
        asked = read_fields(values, Api.TOKENIZE)
        ids = await model.text.tokenize_asked(asked)
        document: Body = {"count": len(ids), "max_model_len": model.info.max_model_len, "tokens": ids}
        if asked.return_token_strs:
            document["token_strs"] = [model.text.vocabulary.piece(token_id) for token_id in ids]
        return Reply(orjson.dumps(document))

    async def _detokenize(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        del headers
        values = await self._parsed(body)
        model = self._model_of(values)
        asked = read_fields(values, Api.DETOKENIZE)
        if asked.tokens is None:
            raise InvalidArgument("tokens: needed", field="tokens")
        return Reply(orjson.dumps({"prompt": await model.text.detokenize(asked.tokens)}))


async def _streamed(runs: Sequence[Running], documents: Documents) -> Reply:
    deltas = Merge(runs)
    try:
        stream = _Stream(await deltas.read(), deltas, documents, runs)
        return Reply(stream, SSE, stream.pour if len(runs) == 1 else None)
    except BaseException:
        await deltas.close()
        raise


async def _gather(runs: Sequence[Running]) -> list[list[Delta]]:
    """All answers; when one fails the others end too."""
    if len(runs) == 1:
        return [await runs[0].whole()]
    tasks = [asyncio.create_task(run.whole()) for run in runs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for run in runs:
            run.close()


def _shown(model: Model, job: Job, counts: Callable[[], Usage]) -> Shown:
    text = job.spec.text
    parsed = text.reasoning is not None or text.tools is not None
    return Shown(job.response, model.text.vocabulary, text.skip_special_tokens, counts, parsed)


def _sum(runs: Sequence[Running]) -> Usage:
    usages = [run.usage for run in runs]
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
        sum(usage.reasoning_tokens for usage in usages),
    )


def _card(model: Model) -> Body:
    info = model.info
    return {
        "id": info.name,
        "object": "model",
        "created": info.created_s,
        "owned_by": "triptych",
        "root": info.name,
        "parent": None,
        "max_model_len": info.max_model_len,
    }
