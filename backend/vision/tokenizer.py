"""The tokenizer of a model that reads images."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.models.tokenizers import NO_CODE, reason_of
from backend.types import image_paths
from backend.utils.errors import UserError
from backend.utils.text import quote
from backend.vision.pictures import open_picture, picture_size

if TYPE_CHECKING:
    import mlx.core as mx

INSTALL = 'pip install "grpo-studio[vision]"'
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What a processor returns about tokens."""


def with_vision(tokenizer: Any, folder: Path, max_pixels: int) -> Any:
    """The tokenizer of the model in `folder`; one that places images, for a model that has a vision tower."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return tokenizer
    has_tower = isinstance(config, dict) and "vision_config" in config
    return VisionTokenizer(tokenizer, folder, max_pixels) if has_tower else tokenizer


class VisionTokenizer:
    """mlx-lm's tokenizer of the model in `folder`, that also places the tokens of images. Everything else is the
    wrapped tokenizer's. `max_pixels`: larger images are scaled down, by models whose image size varies.

    The processor of mlx-vlm is loaded for the first chat with an image.
    """

    reads_images = True

    def __init__(self, tokenizer: Any, folder: Path, max_pixels: int) -> None:
        self._wrapped, self.folder, self._max_pixels = tokenizer, folder, max_pixels
        self._expansions: dict[tuple[int, int], str] = {}
        self._lock = threading.Lock()  # a step reads pixels while a thread tokenises
        file = folder / "chat_template.json"  # of older models
        if tokenizer.chat_template is None and file.is_file():
            tokenizer._tokenizer.chat_template = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
            tokenizer.has_chat_template = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_wrapped"], name)

    def apply_chat_template(self, messages: Any, *, tokenize: bool = True, **variables: Any) -> Any:
        """As mlx-lm's, for one chat or a list of chats; the ids have one image token per feature. Raises UserError."""
        if messages and not isinstance(messages[0], Mapping):
            return [self.apply_chat_template(chat, tokenize=tokenize, **variables) for chat in messages]
        paths, chat = image_paths(messages), [self._as_template_reads(message) for message in messages]
        if not paths:
            return self._wrapped.apply_chat_template(chat, tokenize=tokenize, **variables)
        marker, text = self._marker, self._wrapped.apply_chat_template(chat, tokenize=False, **variables)
        pieces = text.split(marker)
        if len(pieces) != len(paths) + 1:
            has = f"{len(pieces) - 1} image markers {marker} for {len(paths)} images"
            raise UserError("data", f"The prompt has {has}: the chat template leaves images out, or the text has one.")
        for i, path in enumerate(paths, 1):
            pieces[i] = self._expansion(picture_size(path)) + pieces[i]
        text = "".join(pieces)
        return self._wrapped.encode(text, add_special_tokens=False) if tokenize else text

    def image_tokens(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Image features of a chat."""
        return sum(self.tokens_of(path) for path in image_paths(messages))

    def tokens_of(self, path: str) -> int:
        """Features of one picture."""
        return self._expansion(picture_size(path)).count(self._processor.image_token)

    def pixels(self, paths: Sequence[str]) -> dict[str, mx.array]:
        """The vision tower's inputs for the pictures of one prompt, in order, by their names in mlx-vlm."""
        import mlx.core as mx

        made, _ = self._process(self._marker * len(paths), [open_picture(path) for path in paths])
        return {name: mx.array(value) for name, value in made.items() if name not in OF_TEXT}

    def _expansion(self, size: tuple[int, int]) -> str:
        """The text that stands for a picture: the processor decides by its size alone."""
        from PIL import Image

        if size not in self._expansions:
            self._expansions[size] = self._process(self._marker, [Image.new("RGB", size)])[1]
        return self._expansions[size]

    def _process(self, text: str, pictures: list[Any]) -> tuple[dict[str, Any], str]:
        """(the processor's output, the text that it expanded)."""
        processor = self._processor
        with self._lock:
            try:
                made = processor(text=[text], images=pictures)
            except Exception as error:  # of any kind: the code of any processor
                sizes = ", ".join(f"{picture.width} × {picture.height}" for picture in pictures)
                why = f"The model's image processor refuses a picture ({sizes} pixels): {reason_of(error)}."
                raise UserError("data", why) from error
            return dict(made), processor.tokenizer.text

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
            images, processor.image_token = processor.image_processor, processor.image_token
        except Exception as error:  # of any kind: transformers and mlx-vlm
            called = f"The image processor of the model {quote(self.folder, 60)}"
            raise UserError("model", f"{called} cannot be loaded: {reason_of(error)}.") from error
        if hasattr(images, "max_pixels"):
            images.max_pixels = min(images.max_pixels, self._max_pixels)
            images.min_pixels = min(images.min_pixels, images.max_pixels)
        processor.tokenizer = _TextOnly(self._wrapped._tokenizer)
        return processor

    @cached_property
    def _takes_text(self) -> bool:
        """False for chat templates that write nothing for a content that is not a list of parts, such as SmolVLM's."""
        try:
            return "word" in self._wrapped.apply_chat_template([{"role": "user", "content": "word"}], tokenize=False)
        except Exception:  # of any kind: a template runs
            return False

    def _as_template_reads(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message["content"]
        if isinstance(content, str):
            return message if self._takes_text else {**message, "content": [{"type": "text", "text": content}]}
        return {**message, "content": [{"type": "image"} if part["type"] == "image" else part for part in content]}


class _TextOnly:
    """A processor's tokenizer that keeps the text it gets and tokenises nothing."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.text = tokenizer, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_tokenizer"], name)

    def __call__(self, text: list[str], **_: Any) -> dict[str, Any]:
        (self.text,) = text
        return {"input_ids": [[0]], "attention_mask": [[1]]}
