"""What a model takes, and how its items stand in a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from services.common.errors import FailedPrecondition, InvalidArgument
from services.gateway.media.items import MediaOptions, PixelSettings, Processed
from services.gateway.media.options import MOST


@dataclass(slots=True, frozen=True)
class MediaRules:
    """The media side of one model. Tokens are texts of special tokens, one id each."""

    pixels: Mapping[str, PixelSettings]  # by modality: what the model takes
    pads: Mapping[str, str]  # by modality: the token that stands for one embedding, such as <|image_pad|>
    vision_start: str
    vision_end: str
    layout: Literal["timed", "run"]  # of a video: pads of each patch in time after its time, or all pads in one run

    @property
    def modalities(self) -> frozenset[str]:
        """ "image", "video"."""
        return frozenset(self.pixels)

    def placeholder(self, modality: str) -> str:
        """What the chat template writes for one item; `expand` gives the text that takes its place."""
        return self.pads[modality]

    def expand(self, processed: Processed) -> str:
        """The text in place of one placeholder.

        An image is as many pads as it has embeddings. A timed video is, for each patch in time,
        "<0.3 seconds>", then its pads between vision_start and vision_end; the template's own vision_start
        and vision_end stay around all of it (as the processor of transformers 5.23 leaves them).
        """
        pad = self.pads[processed.modality]
        if processed.modality == "image" or self.layout == "run":
            return pad * processed.embeddings
        pads = pad * (processed.embeddings // processed.grid[0])
        return "".join(f"<{at:.1f} seconds>{self.vision_start}{pads}{self.vision_end}" for at in processed.times)

    def embedding_ids(self, token_id: Callable[[str], int | None]) -> Mapping[str, int]:
        """By modality, the id that stands for one embedding. Raises FailedPrecondition where the tokenizer has none."""
        ids = {}
        for modality, pad in self.pads.items():
            found = token_id(pad)
            if found is None:
                raise FailedPrecondition(f"tokenizer.json has no token {pad}", field="tokenizer.json")
            ids[modality] = found
        return ids

    def check_options(self, options: MediaOptions, modality: str, where: str) -> None:
        """Raises InvalidArgument, naming `where` and the option, for what cannot be honoured."""
        pixels = self.pixels[modality]
        for name, value in asdict(options).items():
            if value is None:
                continue
            if modality == "image" and name not in _OF_IMAGES:
                raise InvalidArgument(f"{where}: {name} is of videos", field=where)
            if not 0 < value <= MOST[name]:
                raise InvalidArgument(f"{where}: {name} must be above 0 and at most {MOST[name]}", field=where)
        if options.fps is not None and options.num_frames is not None:
            raise InvalidArgument(f"{where}: fps and num_frames exclude each other", field=where)
        for low, high, least, most in (
            ("min_frames", "max_frames", options.min_frames or pixels.min_frames, options.max_frames),
            ("min_pixels", "max_pixels", options.min_pixels or pixels.min_pixels, options.max_pixels),
            ("min_frames", "max_frames", options.min_frames, options.max_frames or pixels.max_frames),
            ("min_pixels", "max_pixels", options.min_pixels, options.max_pixels or pixels.max_pixels),
        ):
            if least is not None and most is not None and least > most:
                raise InvalidArgument(f"{where}: {low} is {least}, above {high}, {most}", field=where)


_OF_IMAGES = frozenset({"min_pixels", "max_pixels"})
