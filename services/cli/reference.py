"""`triptych settings`: every knob of every role as one Markdown page; docs/settings.md is its output."""

from __future__ import annotations

from collections.abc import Sequence

from services.common.settings import Settings, SettingsError, argument, option, variable
from services.engine.config import EngineSettings
from services.gateway.config import GatewaySettings, RestSettings
from services.worker.config import WorkerSettings

_INTRODUCTION = """\
# Settings

Every knob of every role. A command-line option wins over the environment, the environment over the
table of the role in the settings file (`--config FILE` or `TRIPTYCH_CONFIG`, TOML), the file over
the default. A name that no knob has is an error. `triptych serve` takes the knobs of gateway,
engine and worker together.

This page is the output of `triptych settings`; `make docs` writes it.
"""


def main(command: str, argv: Sequence[str]) -> int:
    """Prints the page."""
    if argv:
        raise SettingsError(f"{command} takes no options, not {argv[0]!r}")
    print(page(), end="")
    return 0


def page() -> str:
    """The page."""
    parts = [_table(cls) for cls in (GatewaySettings, EngineSettings, WorkerSettings, RestSettings)]
    return "\n".join([_INTRODUCTION, *parts])


def _table(cls: type[Settings]) -> str:
    lines = [f"## `{cls.section}`", "", cls.__doc__ or "", "", "| Option | Variable | Default | |", "|---|---|---|---|"]
    for name, info in cls.model_fields.items():
        shown = ",".join(map(str, info.default)) if isinstance(info.default, tuple) else info.default
        default = "" if shown in (None, "") else f"`{shown}`"
        choices = argument(cls, name, info).get("choices")
        text = f"{info.description}" + (f" ({', '.join(choices)})" if choices else "")
        lines.append(f"| `{option(name)}` | `{variable(cls, name)}` | {default} | {text} |")
    return "\n".join(lines) + "\n"
