"""What a way of writing calls is, in one piece: its fixed text and its grammar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.parsers.calls import Calls
from services.gateway.parsers.reader import Reader, Steps


@dataclass(slots=True, frozen=True)
class CallShape:
    """The fixed text around calls, as models are trained on it: what a grammar forces and a history shows.

        opening { before_name NAME before_arguments ARGUMENTS after_call }* closing

    with `between` from one call to the next. NAME is bare, ARGUMENTS is a JSON object.
    """

    before_name: str
    before_arguments: str
    after_call: str = ""
    opening: str = ""
    between: str = ""
    closing: str = ""

    def write(self, calls: tuple[tuple[str, str], ...]) -> str:
        """Calls, each a name and its arguments in JSON."""
        written = [
            f"{self.before_name}{name}{self.before_arguments}{arguments}{self.after_call}" for name, arguments in calls
        ]
        return self.opening + self.between.join(written) + self.closing


@dataclass(slots=True, frozen=True)
class ToolFormat:
    """One way of writing calls.

    markers  texts that are special tokens in some vocabularies, and must be seen all the same
    read     its grammar: reads an answer from where it may have calls, to its end or to the last call allowed
    """

    name: str
    shape: CallShape
    markers: tuple[str, ...]
    read: Callable[[Reader, Calls], Steps[None]]
