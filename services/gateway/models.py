"""The models that this gateway serves: what the engine says of them, and their text side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.common.errors import NotFound, Unavailable
from services.common.logs import Log
from services.gateway.kinds import wrong
from services.gateway.media.door import MediaDoor
from services.gateway.prompts import TextSettings
from services.gateway.text import ModelText
from services.gateway.wire import EngineInfo

_log = Log("models")


@dataclass(slots=True, frozen=True)
class Model:
    """One served model."""

    info: EngineInfo
    text: ModelText


class Models:
    """Follows the engine: a model is read again when the engine comes with other files or limits."""

    def __init__(
        self, threads: int, settings: TextSettings | None = None, door: Callable[[], MediaDoor] | None = None
    ) -> None:
        self._threads = threads
        self._door = door
        self._settings = settings
        self._model: Model | None = None

    async def update(self, info: EngineInfo) -> None:
        """The engine said what it serves. Raises FailedPrecondition for files that can't be read."""
        before = self._model
        if before is not None and _text_side(before.info) == _text_side(info):
            self._model = Model(info, before.text)
            return
        text = await ModelText.load(
            info.name,
            info.text_files,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_n=info.max_n,
            threads=self._threads,
            settings=self._settings,
            door=self._door,
            modalities=frozenset(info.capabilities),
        )
        self._model = Model(info, text)
        _log.info("model loaded", model=info.name, max_model_len=info.max_model_len, fingerprint=info.fingerprint)
        if before is not None:
            before.text.close()

    def all(self) -> list[Model]:
        """The served models; none before the engine has been there."""
        return [] if self._model is None else [self._model]

    def get(self, name: str | None) -> Model:
        """The model of that name, or the only one there is."""
        if self._model is None:
            raise Unavailable("no model is loaded yet", reason="NOT_READY", retry_after_ms=1000)
        if name == "":
            raise wrong("model", "a string that is not empty", name)
        if name is not None and name != self._model.info.name:
            served = self._model.info.name
            raise NotFound(
                f"model {name!r} does not exist; served is {served!r}", field="model", reason="MODEL_NOT_FOUND"
            )
        return self._model

    def close(self) -> None:
        """Lets the threads end."""
        if self._model is not None:
            self._model.text.close()


def _text_side(info: EngineInfo) -> tuple[object, ...]:
    return info.name, info.vocab_size, info.max_model_len, info.max_n, info.capabilities, info.text_files
