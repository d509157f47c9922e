"""One definition per knob. The command line, the environment, the settings file and the help all
come from it; a name that no knob has is an error that offers the nearest one.

    command line  >  TRIPTYCH_<ROLE>_<KNOB>  >  [role] of the --config file  >  default
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Self, Union, get_args, get_origin

from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

FILE_VARIABLE = "TRIPTYCH_CONFIG"
_SHARED_TABLES = ("gateway", "engine", "worker", "rest")
"""Tables that one settings file may hold for other processes than the one that reads it."""


class SettingsError(Exception):
    """A knob that does not exist or a value that it does not take; the message is for the user."""


def knob(default: Any, help: str, **limits: Any) -> Any:
    """A setting with its default, its line of help and its limits (ge, le, gt, lt, pattern)."""
    return Field(default, description=help, **limits)


class Settings(BaseSettings):
    """Base of every role's settings. Fixed once built."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    section: ClassVar[str] = ""
    """Name of the role: the table in the settings file and the middle of the environment names."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` merged: the order of the sources stands there."""
        return (init_settings,)

    @classmethod
    def load(cls, argv: Sequence[str], prog: str, environ: Mapping[str, str] | None = None) -> Self:
        """Reads all sources. Raises SettingsError; `--help` prints and exits."""
        return cls.resolve(vars(build_parser(cls, prog).parse_args(list(argv))), environ)

    @classmethod
    def resolve(cls, given: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Self:
        """The settings from what a command line gave, then environment, file and defaults."""
        environ = os.environ if environ is None else environ
        given = dict(given)
        path = given.pop("config", None) or environ.get(FILE_VARIABLE)
        merged: dict[str, Any] = _from_file(cls, path) if path else {}
        merged.update(_from_environment(cls, environ))
        merged.update(given)
        return cls.build(**merged)

    @classmethod
    def build(cls, **values: Any) -> Self:
        """The settings with these values. Raises SettingsError naming the knob."""
        for name in values:
            if name not in cls.model_fields:
                raise SettingsError(f"unknown setting {name!r}{nearest(name, cls.model_fields)}")
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"]) or "settings"
            raise SettingsError(f"{option(name)}: {first['msg']} (got {first['input']!r})") from None


def option(name: str) -> str:
    """The command-line spelling of a knob: max_num_seqs → --max-num-seqs."""
    return "--" + name.replace("_", "-")


def variable(cls: type[Settings], name: str) -> str:
    """The environment spelling of a knob: max_num_seqs → TRIPTYCH_ENGINE_MAX_NUM_SEQS."""
    return f"TRIPTYCH_{cls.section}_{name}".upper()


class Parser(argparse.ArgumentParser):
    """Raises SettingsError, and says which option was meant when one is unknown."""

    def error(self, message: str) -> NoReturn:
        """Raises instead of leaving the process."""
        raise SettingsError(message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The known options; an unknown one is an error that offers the nearest."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].split("=")[0]
            known = [text for action in self._actions for text in action.option_strings]
            raise SettingsError(f"unknown option {name!r}{nearest(name, known)}")
        return parsed


def build_parser(cls: type[Settings], prog: str) -> argparse.ArgumentParser:
    """The command line of a role, one option per knob, none with a default of its own."""
    parser = Parser(prog=prog, description=cls.__doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help=f"settings file (TOML); also {FILE_VARIABLE}")
    for name, info in cls.model_fields.items():
        parser.add_argument(option(name), dest=name, **argument(cls, name, info))
    return parser


def argument(cls: type[Settings], name: str, info: FieldInfo) -> dict[str, Any]:
    """How argparse takes a knob: its type, help, default as shown and environment name."""
    shown = "none" if info.default in (None, "", ()) else info.default
    text = f"{info.description} (default: {shown}; {variable(cls, name)})".replace("%", "%%")
    kind = _without_none(info.annotation)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction, "help": text}
    if get_origin(kind) is Literal:
        return {"choices": [str(choice) for choice in get_args(kind)], "help": text}
    metavar = {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")
    if get_origin(kind) in (list, tuple):
        return {"type": _split, "metavar": "A,B,…", "help": text}
    return {"metavar": metavar, "help": text}


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [part for part in get_args(annotation) if part is not type(None)]
        return rest[0] if len(rest) == 1 else str
    return annotation


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _from_file(cls: type[Settings], path: str) -> dict[str, Any]:
    try:
        tables = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:  # not there, no UTF-8, no TOML
        raise SettingsError(f"--config: cannot read {path}: {error}") from None
    sections = sorted({kind.section for kind in _subclasses(Settings) if kind.section} | set(_SHARED_TABLES))
    for name in tables:
        if name not in sections:
            raise SettingsError(f"unknown table [{name}] in {path}{nearest(name, sections)}")
    table = tables.get(cls.section, {})
    if not isinstance(table, dict):
        raise SettingsError(f"{cls.section} in {path} is a value; the settings stand in a table, [{cls.section}]")
    for name, value in table.items():
        info = cls.model_fields.get(name.replace("-", "_"))
        if info is None:
            raise SettingsError(f"unknown key {name!r} in [{cls.section}] of {path}{nearest(name, cls.model_fields)}")
        if isinstance(value, bool) and _without_none(info.annotation) is not bool:
            raise SettingsError(f"{name} in [{cls.section}] of {path}: {str(value).lower()} is no value for it")
    return {name.replace("-", "_"): value for name, value in table.items()}


def _from_environment(cls: type[Settings], environ: Mapping[str, str]) -> dict[str, Any]:
    known = {variable(cls, name): (name, info) for name, info in cls.model_fields.items()}
    prefix = f"TRIPTYCH_{cls.section}_".upper()
    values: dict[str, Any] = {}
    for key, text in environ.items():
        if key in known:
            name, info = known[key]
            is_list = get_origin(_without_none(info.annotation)) in (list, tuple)
            values[name] = _split(text) if is_list else text
        elif key.startswith(prefix):
            raise SettingsError(f"unknown variable {key!r}{nearest(key, known)}")
    return values


def _subclasses(cls: type[Settings]) -> Iterable[type[Settings]]:
    for kind in cls.__subclasses__():
        yield kind
        yield from _subclasses(kind)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the known name that was probably meant (maxTokens: max_tokens), or nothing."""
    if len(name) > 100:  # nobody meant it, and comparing takes time with the length
        return ""
    bare = {re.sub(r"[^a-z0-9]", "", other.lower()): other for other in known}
    match = difflib.get_close_matches(re.sub(r"[^a-z0-9]", "", name.lower()), bare, n=1, cutoff=0.8)
    return f"; did you mean {bare[match[0]]!r}?" if match else ""
