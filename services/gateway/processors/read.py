"""The rules of a model, read from its files."""

from __future__ import annotations

from collections.abc import Mapping

from services.gateway.processors.rules import MediaRules


def read_rules(files: Mapping[str, bytes]) -> MediaRules | None:
    """From config.json, preprocessor_config.json, video_preprocessor_config.json or processor_config.json.

    None where the model takes no media, or none that is known. Raises FailedPrecondition naming file and key.
    """
    raise NotImplementedError
