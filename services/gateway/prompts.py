"""Prompts of one model: a conversation or a text to ids, cut where the client allows it.

    conversation ──template──▶ text ──attachments──▶ text with media ──tokenizer──▶ ids ──cut──▶ Prompt

All work that takes time runs in the tokenizer's threads. Knows the template; nothing of sampling.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.common.errors import FailedPrecondition, InvalidArgument
from services.common.settings import nearest
from services.gateway import attachments, toolless
from services.gateway.answers import AnswerForm, effort_variables, read_effort
from services.gateway.asked import Asked
from services.gateway.attachments import NOTHING, Attachments, Held, Wanted
from services.gateway.chat import RESERVED, ChatTemplate, Conversation
from services.gateway.fields import Api, Caller
from services.gateway.kinds import wrong
from services.gateway.limits import DEFAULT_LIMITS
from services.gateway.media.options import read_options
from services.gateway.messages import Message
from services.gateway.text_files import TextFiles
from services.gateway.tokenize import TokenizerPool
from services.gateway.tools import Tool
from services.gateway.validate import ModelFacts, prompt_limit

_KEPT_TEMPLATES = 32


@dataclass(slots=True, frozen=True)
class TextSettings:
    """What the operator decides about texts; see the knobs of the same names."""

    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    allow_chat_template: bool = False


@dataclass(slots=True, frozen=True)
class Talk:
    """A template that was compiled, and what answers of a model with it look like."""

    template: ChatTemplate
    form: AnswerForm


@dataclass(slots=True, frozen=True)
class Rendered:
    """A conversation as a prompt. `talk` is what it was rendered with, `media` what it holds until it is released.

    `text` has one placeholder for each item of media.
    """

    ids: tuple[int, ...]
    text: str
    talk: Talk
    media: Held = NOTHING


class Prompts:
    """The prompts of one model."""

    def __init__(
        self,
        facts: ModelFacts,
        pool: TokenizerPool,
        files: TextFiles,
        settings: TextSettings,
        attachments: Attachments | None = None,
    ) -> None:
        self._facts = facts
        self._attachments = attachments  # None for a model that takes no media
        self._pool = pool
        self._special_tokens = files.special_tokens
        self._settings = settings
        self._talk = None if files.chat_template is None else self._compile(files.chat_template)
        self._tool_talk = self._talk if files.tool_template is None else self._compile(files.tool_template)
        self._theirs: OrderedDict[str, Talk] = OrderedDict()  # by source, those used last at the end

    async def _talk_for(self, asked: Asked, caller: Caller, *, tools: bool) -> Talk:
        """The template for a conversation: the client's if it may bring one, otherwise the model's."""
        if asked.chat_template is not None:
            return await self._of_client(asked.chat_template, caller.spell("chat_template"))
        talk = self._tool_talk if tools else self._talk
        if talk is None:
            raise InvalidArgument(
                f"{caller.turns}: the model {self._facts.name} has no chat template; send a prompt instead",
                field=caller.turns,
            )
        return talk

    async def conversation(
        self, asked: Asked, caller: Caller, messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> Rendered:
        """A conversation with the tools that the model shall see."""
        talk = await self._talk_for(asked, caller, tools=bool(tools))
        conversation = _conversation(asked, caller, talk, messages, tools)
        wanted = self._wanted(asked, caller, conversation)
        size = sum(len(message.text) for message in conversation.messages)
        try:
            if self._attachments is not None:
                self._attachments.check_texts(messages)
            text = await self._pool.run(lambda _: talk.template.render(conversation), size=size)
        except InvalidArgument as error:
            raise _spelled(error, caller) from None
        if wanted is not None:
            return await self._with_media(Rendered((), text, talk), wanted, asked, caller)
        ids = await self.ids(text, asked, caller, caller.turns, add_special_tokens=bool(asked.add_special_tokens))
        return Rendered(ids, text, talk)

    async def ids(
        self, prompt: str | Sequence[int], asked: Asked, caller: Caller, field: str, *, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """The ids of a prompt; of ids the same ids."""
        limit = prompt_limit(asked, caller, self._facts)
        if isinstance(prompt, str):
            most = self._facts.max_model_len if limit is None else None
            ids = await self._pool.encode(prompt, add_special_tokens=add_special_tokens, max_ids=most, field=field)
        else:
            ids = tuple(prompt)
        if self._attachments is not None:
            self._attachments.check_ids(ids, field)
        return cut(ids, limit, asked.truncation_side)

    def _wanted(self, asked: Asked, caller: Caller, conversation: Conversation) -> Wanted | None:
        """The media of a conversation; None where it has none."""
        messages = conversation.messages
        fields = caller.spell("media_io_kwargs"), caller.spell("mm_processor_kwargs")
        if not any(message.content for message in messages):
            for field, value in zip(fields, (asked.media_io_kwargs, asked.mm_processor_kwargs), strict=True):
                if value is not None and value != {}:
                    raise InvalidArgument(f"{field}: only allowed together with images or videos", field=field)
            return None
        if self._attachments is None:
            attachments.refuse_all(messages)
            return None
        options = read_options(asked.media_io_kwargs, asked.mm_processor_kwargs, fields=fields)
        wanted = self._attachments.read(messages, options, asked)
        self._attachments.check_options(wanted, caller)
        return wanted

    async def _with_media(self, rendered: Rendered, wanted: Wanted, asked: Asked, caller: Caller) -> Rendered:
        """The prompt of a conversation that has media. Its `media` are pinned."""
        side, field = self._attachments, caller.turns
        assert side is not None
        side.check_text(rendered.text, wanted.parts, field)
        limit = prompt_limit(asked, caller, self._facts)
        most = self._facts.max_model_len if limit is None else None
        prepared = await side.prepare(wanted)
        held = Held((), tuple(one.pin for one in prepared))
        try:
            processed = [one.processed for one in prepared]
            special = bool(asked.add_special_tokens)
            text = side.expand(rendered.text, processed)
            ids = await self._pool.encode(text, add_special_tokens=special, max_ids=most, field=field)
            placed = await self._pool.run(lambda _: side.place(ids, processed, wanted.parts, field), size=len(text))
            place = caller.spell("truncate_prompt_tokens")
            items = attachments.cut(placed, len(ids), limit, asked.truncation_side, place)
            ids = cut(ids, limit, asked.truncation_side)
        except BaseException:
            held.release()
            raise
        return replace(rendered, ids=ids, media=replace(held, items=tuple(items)))

    async def _of_client(self, source: str, field: str) -> Talk:
        if not self._settings.allow_chat_template:
            raise InvalidArgument(f"{field}: this server takes no chat templates from clients", field=field)
        if len(source) > DEFAULT_LIMITS.template_chars:
            raise InvalidArgument(f"{field}: longer than {DEFAULT_LIMITS.template_chars} characters", field=field)
        talk = self._theirs.get(source)
        if talk is None:
            try:
                talk = await self._pool.run(lambda _: self._compile(source), size=len(source))
            except FailedPrecondition as error:  # the model's own fault in general, here the client's
                raise InvalidArgument(f"{field}: {error.message}", field=field) from None
            self._theirs[source] = talk
            if len(self._theirs) > _KEPT_TEMPLATES:
                self._theirs.popitem(last=False)
        self._theirs.move_to_end(source)
        return talk

    def _compile(self, source: str) -> Talk:
        template = ChatTemplate(source, self._special_tokens)
        return Talk(template, AnswerForm.of(template, self._settings.tool_parser, self._settings.reasoning_parser))


def cut(ids: tuple[int, ...], limit: int | None, side: str | None) -> tuple[int, ...]:
    """At most `limit` of the ids: the last ones, or with side "right" the first."""
    if limit is None or len(ids) <= limit:
        return ids
    return ids[:limit] if side == "right" else ids[len(ids) - limit :]


def _conversation(
    asked: Asked, caller: Caller, talk: Talk, messages: Sequence[Message], tools: Sequence[Tool]
) -> Conversation:
    template = talk.template
    if not (template.takes_tools and template.shows_calls):  # calls are shown in the form in which tools are told
        messages = toolless.tell(messages)
    if tools and not template.takes_tools:
        messages = toolless.offer(messages, tools, system=template.takes_system)
        tools = ()
    effort, effort_field = read_effort(asked, caller)
    efforts = effort_variables(effort, effort_field, template.names, reasons=talk.form.reasoning is not None)
    return Conversation(
        tuple(messages),
        asked.add_generation_prompt,
        bool(asked.continue_final_message),
        _variables(asked, caller, template, efforts, effort_field),
        _documents(asked, caller, template),
        tools,
    )


def _spelled(error: InvalidArgument, caller: Caller) -> InvalidArgument:
    """A template's error with its place as the client knows it; items of an input are not turns one by one."""
    place = error.field or ""
    field = caller.turns if caller.api is Api.RESPONSES else caller.within + place
    words = error.message.removeprefix(place)
    return InvalidArgument(error.message if words == error.message else field + words, field=field)


def _documents(asked: Asked, caller: Caller, template: ChatTemplate) -> list[Mapping[str, Any]] | None:
    documents = asked.documents
    field = caller.spell("documents")
    if documents is None:
        return None
    if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
        raise wrong(field, "an array of objects", documents)
    if documents and "documents" not in template.names:
        raise InvalidArgument(f"{field}: the model's chat template shows no documents", field=field)
    return documents


def _variables(
    asked: Asked, caller: Caller, template: ChatTemplate, efforts: Mapping[str, Any], effort_field: str
) -> Mapping[str, Any]:
    variables = asked.chat_template_kwargs or {}
    field = caller.spell("chat_template_kwargs")
    for name in variables:
        if name in RESERVED:
            raise InvalidArgument(f"{field}.{name}: has a field of its own", field=f"{field}.{name}")
        if name not in template.names:
            raise InvalidArgument(
                f"{field}.{name}: the model's chat template reads no such variable{nearest(name, template.names)}",
                field=f"{field}.{name}",
            )
    for name, value in efforts.items():
        if variables.get(name, value) != value:
            raise InvalidArgument(f"{effort_field}: contradicts {field}.{name}", field=effort_field)
    return {**variables, **efforts}
