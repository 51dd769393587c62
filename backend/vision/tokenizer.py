"""The tokenizer of a model that reads images."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from backend.models.tokenizers import NO_CODE
from backend.types import image_paths
from backend.utils.errors import UserError
from backend.utils.text import quote, reason_of
from backend.vision.pictures import open_picture, picture_size

INSTALL = 'pip install "grpo-studio[vision]"'
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")  # what a processor returns on tokens


def with_vision(tokenizer: Any, folder: Path, max_pixels: int) -> Any:
    """The tokenizer of the model in `folder`; one that places images, for a model that has a vision tower."""
    file = folder / "config.json"
    has_tower = file.is_file() and b'"vision_config"' in file.read_bytes()
    return VisionTokenizer(tokenizer, folder, max_pixels) if has_tower else tokenizer


class VisionTokenizer:
    """mlx-lm's tokenizer of the model in `folder`, that also places the tokens of images. Everything else is the
    wrapped tokenizer's. `max_pixels`: larger images are scaled down, by models whose image size varies. The processor
    of mlx-vlm is loaded for the first chat with an image."""

    reads_images = True

    def __init__(self, tokenizer: Any, folder: Path, max_pixels: int) -> None:
        self._wrapped, self.folder, self._max_pixels = tokenizer, folder, max_pixels
        self._expansions: dict[tuple[int, int], str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_wrapped"], name)

    def apply_chat_template(self, messages: Any, *, tokenize: bool = True, **variables: Any) -> Any:
        """As mlx-lm's, for one chat; the ids have one image token per feature. Raises UserError."""
        paths, chat = image_paths(messages), [self._as_template_reads(message) for message in messages]
        if not paths:
            return self._wrapped.apply_chat_template(chat, tokenize=tokenize, **variables)
        pieces = self._wrapped.apply_chat_template(chat, tokenize=False, **variables).split(self._marker)
        if len(pieces) != len(paths) + 1:
            has = f"{len(pieces) - 1} image markers {self._marker} for {len(paths)} images"
            raise UserError("data", f"The prompt has {has}: the chat template leaves images out, or the text has one.")
        text = pieces[0] + "".join(map("".join, zip(map(self._expansion, paths), pieces[1:], strict=True)))
        return self._wrapped.encode(text, add_special_tokens=False) if tokenize else text

    def tokens_of(self, path: str) -> int:
        """Image tokens of one picture in a prompt."""
        return self._expansion(path).count(self._processor.image_token)

    def pixels(self, paths: Sequence[str]) -> dict[str, Any]:
        """The vision tower's inputs for the pictures of one prompt, by their names in mlx-vlm. Raises UserError."""
        import mlx.core as mx

        made = self._processed([open_picture(path) for path in paths])
        return {name: mx.array(value) for name, value in made.items() if name not in OF_TEXT}

    def _expansion(self, path: str) -> str:
        """The text that stands for a picture: the processor decides by its size alone."""
        from PIL import Image

        size = picture_size(path)
        if size not in self._expansions:
            ids = np.array(self._processed([Image.new("RGB", size)])["input_ids"])
            self._expansions[size] = "".join(map(chr, ids.flatten()))
        return self._expansions[size]

    def _processed(self, pictures: list[Any]) -> Mapping[str, Any]:
        processor, text = self._processor, self._marker * len(pictures)
        try:
            return processor(text=[text], images=[picture.convert("RGB") for picture in pictures])
        except Exception as error:  # of any kind: the code of any processor, and Pillow's decoders
            sizes = ", ".join(f"{picture.width} × {picture.height}" for picture in pictures)
            why = f"The model's image processor refuses a picture ({sizes} pixels): {reason_of(error)}."
            raise UserError("data", why) from error

    @property
    def _marker(self) -> str:
        """What the chat template writes for an image."""
        return getattr(self._processor, "boi_token", None) or self._processor.image_token

    @cached_property
    def _processor(self) -> Any:
        try:
            from mlx_vlm.utils import get_model_and_args
        except ImportError as error:
            raise UserError("data", f"Images need the package mlx-vlm; install it: {INSTALL}.") from error
        from transformers import AutoProcessor

        try:
            get_model_and_args(json.loads((self.folder / "config.json").read_text(encoding="utf-8")))
            processor: Any = AutoProcessor.from_pretrained(self.folder, **NO_CODE)
            images = processor.image_processor
            if hasattr(images, "max_pixels"):
                images.max_pixels = min(images.max_pixels, self._max_pixels)
                images.min_pixels = min(images.min_pixels, images.max_pixels)
            processor.tokenizer = _Characters(self._wrapped._tokenizer)
            assert processor.image_token
        except Exception as error:  # of any kind: transformers and mlx-vlm
            called = f"The image processor of the model {quote(self.folder, 60)}"
            raise UserError("model", f"{called} cannot be loaded: {reason_of(error)}.") from error
        return processor

    @cached_property
    def _takes_text(self) -> bool:
        """False for chat templates that write nothing for a content that is not a list of parts, such as SmolVLM's."""
        with suppress(Exception):  # of any kind: a template runs
            return "word" in self._wrapped.apply_chat_template([{"role": "user", "content": "word"}], tokenize=False)
        return False

    def _as_template_reads(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        if isinstance(content, str):
            return message if self._takes_text else message | {"content": [{"type": "text", "text": content}]}
        return message | {"content": [{"type": "image"} if part["type"] == "image" else part for part in content]}


class _Characters:
    """A processor's tokenizer with an id per character, so that the ids are the text with its images expanded."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_tokenizer"], name)

    def __call__(self, text: list[str], **_: Any) -> dict[str, Any]:
        return {"input_ids": [list(map(ord, text[0]))], "attention_mask": [[1] * len(text[0])]}
