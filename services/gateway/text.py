"""A model's text side in one piece: tokenizer, chat template and facts, and from them whole jobs.

    values + Envelope ──▶ fields ──▶ prompts (threads) ──▶ answers, constraints, checks ──▶ Job(spec, response, echo)

Knows no protocol: `values` is a mapping with the names of the field table, from JSON or from gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.common.errors import InvalidArgument
from services.gateway.asked import Asked
from services.gateway.attachments import NOTHING, Attachments, Held
from services.gateway.constraints.building import Constraints
from services.gateway.constraints.parts import Calls, Surroundings
from services.gateway.fields import Api, Caller, read_fields
from services.gateway.kinds import wrong
from services.gateway.limits import DEFAULT_LIMITS
from services.gateway.media.door import MediaDoor
from services.gateway.media.items import MODALITIES
from services.gateway.messages import Message, read_messages
from services.gateway.parsers.formats import opens_reasoning, tool_format
from services.gateway.processors.read import read_rules
from services.gateway.prompts import Prompts, Rendered, TextSettings
from services.gateway.request import (
    Constraint,
    GenerateSpec,
    ReasoningOptions,
    ResponseOptions,
    TextOptions,
    ToolOptions,
)
from services.gateway.text_files import TextFiles, read_files
from services.gateway.tokenize import Tokenizer, TokenizerPool
from services.gateway.tools import Tool, ToolChoice, read_tool_choice, read_tools
from services.gateway.validate import (
    ModelFacts,
    check_ids,
    check_prompt,
    check_tool_fields,
    forbidding,
    labels,
    prompt_field,
    read_prompts,
    response_options,
    sampling_params,
    text_options,
)
from services.gateway.vocabulary import Vocabulary

TOKENIZE = Caller(Api.TOKENIZE)


@dataclass(slots=True, frozen=True)
class Envelope:
    """What comes with a request beside its body. `request_id` is used where the body has none."""

    request_id: str
    traceparent: str | None = None
    deadline_ms: int | None = None


@dataclass(slots=True, frozen=True)
class Job:
    """A request ready to run, how to show its answer, the text that is echoed before it, and what it holds.

    `media` is to be released when the request has ended.
    """

    spec: GenerateSpec
    response: ResponseOptions
    echo: str = ""
    media: Held = NOTHING


@dataclass(slots=True, frozen=True)
class _Request:
    """What was asked, by which call, and what came with it."""

    asked: Asked
    caller: Caller
    envelope: Envelope


@dataclass(slots=True, frozen=True)
class _Prompt:
    """The ids of a prompt, how a client calls the field that it came from, and what of it is echoed."""

    ids: tuple[int, ...]
    field: str
    echo: str = ""
    echoed: bool = False  # all of it is
    media: Held = NOTHING


class ModelText:
    """Made once per model from its text files; `close` lets its threads end."""

    def __init__(self, facts: ModelFacts, pool: TokenizerPool, prompts: Prompts) -> None:
        self.facts = facts
        self._pool = pool
        self._prompts = prompts
        self._constraints = Constraints()

    @classmethod
    async def load(
        cls,
        name: str,
        files: Mapping[str, bytes],
        *,
        vocab_size: int,
        max_model_len: int,
        max_n: int,
        threads: int = 2,
        settings: TextSettings | None = None,
        door: Callable[[], MediaDoor] | None = None,
        modalities: frozenset[str] = frozenset(),
    ) -> ModelText:
        """Reads the files off the event loop; raises FailedPrecondition that names the file at fault.

        `modalities` are the media that the worker takes, `door` makes what prepares them.
        """

        def build() -> ModelText:
            read = read_files(files)
            pool = TokenizerPool(read.tokenizer_json, threads=threads)
            eos = _eos_ids(read, pool, vocab_size)
            facts = ModelFacts(name, vocab_size, max_model_len, max_n, eos, read.sampling_defaults)
            media = _attachments(files, pool, door, modalities)
            return cls(facts, pool, Prompts(facts, pool, read, settings or TextSettings(), media))

        return await asyncio.to_thread(build)

    @property
    def vocabulary(self) -> Vocabulary:
        """Pieces, bytes and special ids of the model."""
        return self._pool.vocabulary

    def close(self) -> None:
        """Lets the threads end."""
        self._pool.close()
        self._constraints.close()

    # Jobs

    async def chat(self, body: Mapping[str, object], envelope: Envelope) -> Job:
        """The job of a /v1/chat/completions body."""
        asked = read_fields(body, Api.CHAT)
        return await self._talk(_Request(asked, Caller(Api.CHAT), envelope), read_messages(asked.messages))

    async def respond(self, asked: Asked, messages: Sequence[Message], envelope: Envelope) -> Job:
        """The job of /v1/responses: `messages` are what its input and instructions say."""
        return await self._talk(_Request(asked, Caller(Api.RESPONSES), envelope), messages)

    async def converse(
        self, values: Mapping[str, object], messages: Sequence[Message], envelope: Envelope, *, prefix: str = ""
    ) -> Job:
        """The job of a gRPC Chat; `prefix` is how its caller spells the names of `values`."""
        asked = read_fields(values, Api.GRPC, prefix=prefix)
        return await self._talk(_Request(asked, Caller(Api.GRPC, prefix), envelope), messages)

    async def completions(self, body: Mapping[str, object], envelope: Envelope) -> list[Job]:
        """The jobs of a /v1/completions body, one per prompt."""
        request = _Request(read_fields(body, Api.COMPLETIONS), Caller(Api.COMPLETIONS), envelope)
        prompts = read_prompts(request.asked.prompt)
        constraint = await self._constraints.build(request.asked, request.caller)
        return [
            await self._continue(request, prompt, prompt_field(request.asked.prompt, i), constraint)
            for i, prompt in enumerate(prompts)
        ]

    async def generate(
        self, values: Mapping[str, object], prompt: str | Sequence[int], envelope: Envelope, *, prefix: str = ""
    ) -> Job:
        """The job of a gRPC Generate."""
        asked = read_fields(values, Api.GRPC, prefix=prefix)
        field = "text" if isinstance(prompt, str) else "token_ids"
        caller = Caller(Api.GRPC, prefix)
        constraint = await self._constraints.build(asked, caller)
        return await self._continue(_Request(asked, caller, envelope), prompt, field, constraint)

    async def inputs(self, asked: Asked, *, field: str = "input") -> list[tuple[int, ...]]:
        """The ids of what a request for vectors has as its input."""
        inputs = []
        for i, text in enumerate(read_prompts(asked.input, field=field, most=DEFAULT_LIMITS.inputs)):
            where = prompt_field(asked.input, i, field=field)
            if not text:  # the tokenizer may make a token of its own of it
                raise InvalidArgument(f"{where}: empty; at least one token is needed", field=where)
            if not i % 256:  # ids need no thread, so others would wait
                await asyncio.sleep(0)
            ids = await self._prompts.ids(text, asked, Caller(Api.EMBEDDINGS), where)
            check_prompt(ids, self.facts, where, answer=0)
            inputs.append(ids)
        return inputs

    # Tokens

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of a text, however many."""
        return await self._pool.encode(text, add_special_tokens=add_special_tokens)

    async def tokenize_asked(self, asked: Asked) -> tuple[int, ...]:
        """The ids of what a /tokenize body has: a prompt, or a conversation as a chat would send it."""
        if asked.messages is not None and asked.prompt is None:
            return await self.tokenize_messages(read_messages(asked.messages), asked)
        if not isinstance(asked.prompt, str) or asked.messages is not None:
            raise InvalidArgument("prompt: a string, or messages instead of it, is needed", field="prompt")
        for name, value in (
            ("add_generation_prompt", asked.add_generation_prompt),
            ("continue_final_message", asked.continue_final_message),
            ("chat_template", asked.chat_template),
            ("chat_template_kwargs", asked.chat_template_kwargs),
            ("documents", asked.documents),
            ("media_io_kwargs", asked.media_io_kwargs),
            ("mm_processor_kwargs", asked.mm_processor_kwargs),
            ("tools", asked.tools),
        ):
            if value is not None:
                raise InvalidArgument(f"{name}: only allowed together with messages", field=name)
        return await self.tokenize(asked.prompt, add_special_tokens=asked.add_special_tokens is not False)

    async def tokenize_messages(
        self, messages: Sequence[Message], asked: Asked, caller: Caller = TOKENIZE
    ) -> tuple[int, ...]:
        """The ids of a conversation, as a chat would send them."""
        tools = read_tools(asked.tools, field=caller.spell("tools"))
        rendered = await self._prompts.conversation(asked, caller, messages, tools)
        rendered.media.release()
        return rendered.ids

    async def detokenize(self, ids: Sequence[int], *, field: str = "tokens") -> str:
        """The text of ids, special tokens included."""
        check_ids(ids, self.facts, field)
        return await self._pool.decode(ids)

    # Steps

    async def _talk(self, request: _Request, messages: Sequence[Message]) -> Job:
        asked, caller = request.asked, request.caller
        if not messages:
            raise wrong(caller.turns, "at least one message", [])
        if asked.echo and not asked.continue_final_message:
            raise InvalidArgument("echo: needs continue_final_message to be true", field="echo")
        flat = caller.api is Api.RESPONSES
        tools = read_tools(asked.tools, field=caller.spell("tools"), flat=flat)
        choice = read_tool_choice(asked.tool_choice, tools, field=caller.spell("tool_choice"), flat=flat)
        check_tool_fields(asked, caller, tools=bool(tools), forced=choice.forced)
        shown = () if choice.mode == "none" else tools
        rendered = await self._prompts.conversation(asked, caller, messages, shown)
        try:
            return await self._answered(request, messages, rendered, tools, choice)
        except BaseException:
            rendered.media.release()
            raise

    async def _answered(
        self,
        request: _Request,
        messages: Sequence[Message],
        rendered: Rendered,
        tools: Sequence[Tool],
        choice: ToolChoice,
    ) -> Job:
        """The job of a conversation that is rendered."""
        asked, caller = request.asked, request.caller
        shown = () if choice.mode == "none" else tools
        continued = messages[-1].text if asked.continue_final_message else ""
        text = self._answer(request, rendered, continued, self._tools(request, rendered, shown, choice))
        prompt = _Prompt(rendered.ids, caller.turns, continued if asked.echo else "", media=rendered.media)
        calls = self._calls(request, text.tools, tools, choice)
        around = Surroundings(text.reasoning, self.vocabulary, () if calls is None else calls.marks)
        constraint = await self._constraints.build(asked, caller, calls=calls, around=around)
        return await self._job(request, prompt, text, constraint)

    def _answer(self, request: _Request, rendered: Rendered, continued: str, calls: ToolOptions | None) -> TextOptions:
        """How the answer to a conversation is read: reasoning and calls apart from text."""
        asked, form = request.asked, rendered.talk.form
        reasoning = None
        if form.reasoning is not None:
            inside = opens_reasoning(rendered.text, form.reasoning, continued)
            reasoning = ReasoningOptions(*form.reasoning, inside, asked.include_reasoning is not False)
        kept = form.kept_ids(self.vocabulary, tools=calls is not None)
        return text_options(asked, kept_ids=kept, reasoning=reasoning, tools=calls)

    def _tools(
        self, request: _Request, rendered: Rendered, tools: Sequence[Tool], choice: ToolChoice
    ) -> ToolOptions | None:
        """How calls are read; None where there are none. A tool that is named is called once."""
        if not tools:
            return None
        known = rendered.talk.form.tool_format
        if known is None:
            field = request.caller.spell("tools")
            raise InvalidArgument(f"{field}: how this model writes calls of tools is not known", field=field)
        parallel = request.asked.parallel_tool_calls is not False and choice.mode != "named"
        return ToolOptions(known, tuple(tool.name for tool in tools), parallel, choice.forced)

    def _calls(
        self, request: _Request, options: ToolOptions | None, tools: Sequence[Tool], choice: ToolChoice
    ) -> Calls | None:
        """What calls of tools must look like; None where there are none."""
        if options is None:
            return None
        form = tool_format(options.format)
        caller = request.caller
        flat = caller.api is Api.RESPONSES
        return Calls(tools, choice, form.shape, form.markers, options.parallel, caller.spell("tools"), flat)

    async def _continue(
        self, request: _Request, prompt: str | Sequence[int], field: str, constraint: Constraint | None
    ) -> Job:
        asked, caller = request.asked, request.caller
        special = asked.add_special_tokens is not False
        ids = await self._prompts.ids(prompt, asked, caller, field, add_special_tokens=special)
        text = text_options(asked)
        echo = await self._echo(prompt, ids, asked, text) if asked.echo else ""
        whole = _Prompt(ids, field, echo, echoed=bool(asked.echo))
        return await self._job(request, whole, text, constraint)

    async def _echo(self, prompt: str | Sequence[int], ids: tuple[int, ...], asked: Asked, text: TextOptions) -> str:
        if isinstance(prompt, str) and asked.truncate_prompt_tokens is None:
            return prompt
        return await self._pool.decode(ids, skip_special_tokens=text.skip_special_tokens)

    async def _job(self, request: _Request, prompt: _Prompt, text: TextOptions, constraint: Constraint | None) -> Job:
        asked, caller, envelope = request.asked, request.caller, request.envelope
        ids = prompt.ids
        check_prompt(ids, self.facts, prompt.field)
        sampling = sampling_params(
            asked,
            self.facts,
            caller,
            prompt_tokens=len(ids),
            banned_sequences=await self._banned(asked.bad_words) if asked.bad_words else (),
            constraint=constraint,
            echoes_prompt=prompt.echoed,
        )
        spec = GenerateSpec(
            request_id=asked.request_id or envelope.request_id,
            model=self.facts.name,
            prompt_ids=ids,
            sampling=sampling,
            text=text,
            priority=asked.priority or 0,
            cache_salt=asked.cache_salt,
            deadline_ms=envelope.deadline_ms,
            traceparent=envelope.traceparent,
            labels=labels(asked),
            forbids=forbidding(asked, caller, constraint),
            media=prompt.media.items,
        )
        return Job(spec, response_options(asked, sampling, caller), prompt.echo, prompt.media)

    async def _banned(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """The id sequences of words, at the start of a text and after a space."""

        def encode(tokenizer: Tokenizer) -> list[tuple[int, ...]]:
            found: dict[tuple[int, ...], None] = {}
            for word in words:
                bare = tuple(tokenizer.encode(word, add_special_tokens=False))
                spaced = tuple(tokenizer.encode(" " + word.lstrip(" "), add_special_tokens=False))
                found[bare] = None
                if len(spaced) == len(bare):  # else the space is a token of its own, and `bare` covers it
                    found[spaced] = None
            return [ids for ids in found if ids]

        return await self._pool.run(encode)


def _attachments(
    files: Mapping[str, bytes], pool: TokenizerPool, door: Callable[[], MediaDoor] | None, modalities: frozenset[str]
) -> Attachments | None:
    """The media side of a model; None where its worker takes none, or this process prepares none."""
    taken = modalities & set(MODALITIES)
    rules = read_rules(files) if door is not None and taken else None
    if door is None or rules is None:
        return None
    return Attachments(rules, rules.embedding_ids(pool.id_of), rules.modalities & taken, door())


def _eos_ids(files: TextFiles, pool: TokenizerPool, vocab_size: int) -> tuple[int, ...]:
    ids = [pool.id_of(token) if isinstance(token, str) else token for token in files.eos_tokens]
    return tuple(dict.fromkeys(i for i in ids if i is not None and 0 <= i < vocab_size))
