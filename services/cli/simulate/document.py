"""--json: one object, written as the run goes on, so that its length costs no memory."""

from __future__ import annotations

import json
from typing import TextIO

from services.cli.simulate.observer import Observer, Step
from services.cli.simulate.summary import Summary


class Document(Observer):
    """`{"steps": […], "summary": {…}}`, one step a line."""

    def __init__(self, out: TextIO, summary: Summary) -> None:
        self._out = out
        self._summary = summary
        self._before = '{"steps": ['

    def step(self, step: Step) -> None:
        """Writes a step."""
        self._out.write(f"{self._before}\n{json.dumps(step.as_json())}")
        self._before = ","

    def close(self) -> None:
        """Writes the summary."""
        opening = self._before if self._before != "," else ""
        self._out.write(f'{opening}\n], "summary": {json.dumps(self._summary.as_json())}}}\n')
        self._out.flush()
