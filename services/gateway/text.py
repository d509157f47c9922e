"""A model's text side in one piece: tokenizer, chat template and facts, and from them whole jobs.

    values + Envelope ──▶ fields ──▶ template, tokenizer (threads) ──▶ checks ──▶ Job(spec, response, echo)

Knows no protocol: `values` is a mapping with the names of the field table, from JSON or from gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.errors import InvalidArgument
from services.gateway.asked import Asked
from services.gateway.chat import ChatTemplate, Conversation
from services.gateway.fields import Api, read_fields
from services.gateway.kinds import wrong
from services.gateway.messages import Message, read_messages
from services.gateway.request import GenerateSpec, ResponseOptions
from services.gateway.text_files import TextFiles, read_files
from services.gateway.tokenize import Tokenizer, TokenizerPool
from services.gateway.validate import (
    ModelFacts,
    check_ids,
    check_prompt,
    read_prompts,
    response_options,
    sampling_params,
    text_options,
)
from services.gateway.vocabulary import Vocabulary


@dataclass(slots=True, frozen=True)
class Envelope:
    """What comes with a request beside its body. `request_id` is used where the body has none."""

    request_id: str
    traceparent: str | None = None
    deadline_ms: int | None = None


@dataclass(slots=True, frozen=True)
class Job:
    """A request ready to run, how to show its answer, and the prompt's text where that is echoed."""

    spec: GenerateSpec
    response: ResponseOptions
    echo: str = ""


class ModelText:
    """Made once per model from its text files; `close` lets its threads end."""

    def __init__(self, facts: ModelFacts, pool: TokenizerPool, template: ChatTemplate | None) -> None:
        self.facts = facts
        self._pool = pool
        self._template = template

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
    ) -> ModelText:
        """Reads the files off the event loop; raises FailedPrecondition that names the file at fault."""

        def build() -> ModelText:
            read = read_files(files)
            pool = TokenizerPool(read.tokenizer_json, threads=threads)
            eos = _eos_ids(read, pool, vocab_size)
            facts = ModelFacts(name, vocab_size, max_model_len, max_n, eos, read.sampling_defaults)
            template = ChatTemplate(read.chat_template, read.special_tokens) if read.chat_template else None
            return cls(facts, pool, template)

        return await asyncio.to_thread(build)

    @property
    def vocabulary(self) -> Vocabulary:
        """Pieces, bytes and special ids of the model."""
        return self._pool.vocabulary

    def close(self) -> None:
        """Lets the threads end."""
        self._pool.close()

    # Jobs

    async def chat(self, body: Mapping[str, object], envelope: Envelope) -> Job:
        """The job of a /v1/chat/completions body."""
        asked = read_fields(body, Api.CHAT)
        conversation = self._conversation(asked, read_messages(asked.messages))
        ids = await self._render(conversation, add_special_tokens=bool(asked.add_special_tokens))
        return await self._job(asked, Api.CHAT, ids, "messages", envelope)

    async def completions(self, body: Mapping[str, object], envelope: Envelope) -> list[Job]:
        """The jobs of a /v1/completions body, one per prompt."""
        asked = read_fields(body, Api.COMPLETIONS)
        jobs = []
        for prompt in read_prompts(asked.prompt):
            ids = await self._prompt_ids(prompt, "prompt", asked.add_special_tokens is not False)
            jobs.append(await self._job(asked, Api.COMPLETIONS, ids, "prompt", envelope, prompt=prompt))
        return jobs

    async def generate(
        self, values: Mapping[str, object], prompt: str | Sequence[int], envelope: Envelope, *, prefix: str = ""
    ) -> Job:
        """The job of a gRPC Generate; `prefix` is how its caller spells the names of `values`."""
        asked = read_fields(values, Api.GRPC, prefix=prefix)
        field = "text" if isinstance(prompt, str) else "token_ids"
        ids = await self._prompt_ids(prompt, field, True)
        return await self._job(asked, Api.GRPC, ids, field, envelope, prompt=prompt, prefix=prefix)

    async def converse(
        self, values: Mapping[str, object], messages: Sequence[Message], envelope: Envelope, *, prefix: str = ""
    ) -> Job:
        """The job of a gRPC Chat."""
        asked = read_fields(values, Api.GRPC, prefix=prefix)
        if not messages:
            raise wrong("messages", "at least one message", [])
        ids = await self._render(self._conversation(asked, tuple(messages)), add_special_tokens=False)
        return await self._job(asked, Api.GRPC, ids, "messages", envelope, prefix=prefix)

    # Tokens

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """The ids of a text, however many."""
        return await self._pool.encode(text, add_special_tokens=add_special_tokens)

    async def tokenize_messages(self, messages: Sequence[Message], asked: Asked) -> tuple[int, ...]:
        """The ids of a conversation, as a chat would send them."""
        conversation = self._conversation(asked, tuple(messages))
        return await self._render(conversation, add_special_tokens=bool(asked.add_special_tokens))

    async def detokenize(self, ids: Sequence[int], *, field: str = "tokens") -> str:
        """The text of ids, special tokens included."""
        check_ids(ids, self.facts, field)
        return await self._pool.decode(ids)

    # Steps

    def _conversation(self, asked: Asked, messages: tuple[Message, ...]) -> Conversation:
        documents = asked.documents
        if documents is not None and not (
            isinstance(documents, list) and all(isinstance(document, dict) for document in documents)
        ):
            raise wrong("documents", "an array of objects", documents)
        return Conversation(
            messages,
            asked.add_generation_prompt,
            bool(asked.continue_final_message),
            asked.chat_template_kwargs or {},
            documents,
        )

    async def _render(self, conversation: Conversation, *, add_special_tokens: bool) -> tuple[int, ...]:
        template = self._template
        if template is None:
            raise InvalidArgument(
                f"messages: the model {self.facts.name} has no chat template; send a prompt instead", field="messages"
            )
        size = sum(len(message.text) for message in conversation.messages)
        text = await self._pool.run(lambda _: template.render(conversation), size=size)
        return await self._pool.encode(
            text, add_special_tokens=add_special_tokens, max_ids=self.facts.max_model_len, field="messages"
        )

    async def _prompt_ids(self, prompt: str | Sequence[int], field: str, add_special_tokens: bool) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        return await self._pool.encode(
            prompt, add_special_tokens=add_special_tokens, max_ids=self.facts.max_model_len, field=field
        )

    async def _job(
        self,
        asked: Asked,
        api: Api,
        ids: tuple[int, ...],
        field: str,
        envelope: Envelope,
        *,
        prompt: str | Sequence[int] = "",
        prefix: str = "",
    ) -> Job:
        check_prompt(ids, self.facts, field)
        banned = await self._banned(asked.bad_words) if asked.bad_words else []
        sampling = sampling_params(
            asked, self.facts, prompt_tokens=len(ids), api=api, prefix=prefix, banned_sequences=banned
        )
        text = text_options(asked)
        response = response_options(asked, sampling, prefix=prefix)
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
        )
        return Job(spec, response, await self._echo(prompt, text.skip_special_tokens) if response.echo else "")

    async def _echo(self, prompt: str | Sequence[int], skip_special_tokens: bool) -> str:
        if isinstance(prompt, str):
            return prompt
        return await self._pool.decode(prompt, skip_special_tokens=skip_special_tokens)

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


def _eos_ids(files: TextFiles, pool: TokenizerPool, vocab_size: int) -> tuple[int, ...]:
    ids = [pool.id_of(token) if isinstance(token, str) else token for token in files.eos_tokens]
    return tuple(dict.fromkeys(i for i in ids if i is not None and 0 <= i < vocab_size))
