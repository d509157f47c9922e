"""The `triptych` command: finds the sub-command and hands over. Each one is imported when it is used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib import metadata

from services.common.settings import SettingsError, nearest

COMMANDS = {
    "serve": ("serve", "serve a model on this machine: worker, engine and gateway"),
    "plan": ("plan", "show the memory that serving a model takes, in bytes"),
    "chat": ("chat", "talk to a model in the terminal"),
    "complete": ("complete", "continue a text"),
    "top": ("top.command", "show what a running cluster does"),
    "bench": ("bench", "measure an OpenAI-compatible server"),
    "simulate": ("simulate.command", "run a workload through the scheduler, without a model"),
    "export-text": ("export_text", "write a model's text files (tokenizer, config, template) to a folder"),
    "gateway": ("role", "run one gateway"),
    "engine": ("role", "run one engine"),
    "worker": ("role", "run one worker"),
    "rest": ("role", "run the REST API in a process of its own, before a gateway"),
    "settings": ("reference", "print every knob of every role as a page"),
}


def version() -> str:
    """The release of the installed package."""
    return metadata.version("triptych")


def usage() -> str:
    """The list of sub-commands."""
    lines = [f"  {name:<12} {text}" for name, (_, text) in COMMANDS.items()]
    closing = ["  version      print the release", "", "`triptych COMMAND --help` lists the options of a command."]
    return "\n".join(["usage: triptych COMMAND [OPTION…]", "", "commands:", *lines, *closing])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a sub-command and returns its exit status; 2 for a command line that makes no sense."""
    words = list(sys.argv[1:] if argv is None else argv)
    name, rest = (words[0], words[1:]) if words else ("", [])
    if name in ("", "-h", "--help", "help"):
        print(usage())
        return 0 if name else 2
    if name in ("version", "--version", "-V"):
        print(f"triptych {version()}")
        return 0
    if name not in COMMANDS:
        print(f"triptych: unknown command {name!r}{nearest(name, COMMANDS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"services.cli.{COMMANDS[name][0]}")
    try:
        status: int = module.main(name, rest)
    except SettingsError as error:
        print(f"triptych {name}: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
