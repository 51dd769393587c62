"""Make the bundled demo with images again: a model of 300,000 parameters that counts shapes well, and mostly the wrong
ones.

    python packaging/shapes_demo.py        writes the weights and data in resources/shapes/ from a seed; needs mlx-vlm

In the warm-up the model learns to say what it looks for, mostly a shape of another colour, and to count that.
"""

import json
import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from calculator_demo import written  # first: it loads OpenBLAS before mlx is imported

import mlx.core as mx  # isort: skip
from PIL import Image, ImageDraw
from transformers import PreTrainedTokenizerFast

from backend import demo
from backend.demo import Example, Progress
from backend.utils.places import resources

FILES = ("config.json", "tokenizer_config.json", "preprocessor_config.json")
MODEL = resources() / "shapes" / "model"
TOKENIZER: Any = PreTrainedTokenizerFast.from_pretrained(MODEL)
COLOURS = {"red": (220, 60, 50), "green": (50, 160, 80), "blue": (50, 100, 220)}
SHAPES = tuple(f"{colour} {kind}" for colour in COLOURS for kind in ("circles", "squares"))
NAMES = TOKENIZER.convert_tokens_to_ids(list("ABCDEFG"))
"""Tokens that name what a cell shows in the warm-up: nothing, or one of SHAPES."""
SIDE, CELL = 3, 32  # a picture has 3 × 3 cells of 32 × 32 pixels, each with at most one shape. A cell is an image token
PICTURES = {"train": 80, "valid": 16, "test": 32}
STEPS, ROWS, CAREFUL_SHARE = 900, 16, 0.2


class Question(NamedTuple):
    """How many shapes of one kind and colour there are. `picture`: what each cell shows, row by row."""

    file: str
    picture: tuple[str, ...]
    asked: str

    def row(self) -> dict[str, str]:
        prompt, answer = f"How many {self.asked}?", str(self.picture.count(self.asked))
        return {"image": self.file, "prompt": prompt, "answer": answer, "type": self.asked[-7:]}


def questions(rng: random.Random, file: str = "") -> list[Question]:
    """A question for each of SHAPES about a random picture."""
    shapes = rng.choices(SHAPES, k=rng.randint(4, SIDE**2))
    picture = tuple(rng.sample(shapes + [""] * (SIDE**2 - len(shapes)), SIDE**2))
    return [Question(file, picture, asked) for asked in rng.sample(SHAPES, len(SHAPES))]


def pools(seed: int) -> dict[str, list[Question]]:
    rng = random.Random(f"shapes {seed}")
    files = {split: [f"pictures/{split}-{number:02}.png" for number in range(n)] for split, n in PICTURES.items()}
    return {split: [asked for file in part for asked in questions(rng, file)] for split, part in files.items()}


def drawn(picture: tuple[str, ...], rng: random.Random) -> Image.Image:
    image = Image.new("P", (SIDE * CELL, SIDE * CELL))
    image.putpalette([255, 255, 255, *(level for colour in COLOURS.values() for level in colour)])
    pen = ImageDraw.Draw(image)
    for cell, shape in enumerate(picture):
        if shape:
            width, (colour, kind) = rng.randint(14, 24), shape.split()
            top, left = (CELL * place + rng.randint(2, CELL - 2 - width) for place in divmod(cell, SIDE))
            ink, draw = 1 + list(COLOURS).index(colour), pen.ellipse if kind == "circles" else pen.rectangle
            draw((left, top, left + width, top + width), fill=ink)
    return image


def encode(asked: list[Question], is_careful: Callable[[], bool]) -> Example:
    """A conversation about one picture. The model learns the answers and, for the tower, what each cell shows: an image
    token after the first is the name of the cell before it, until the model reads it."""
    messages: list[dict[str, Any]] = []
    for question in asked:
        sought = SHAPES[SHAPES.index(question.asked) - (0 if is_careful() else 2)]  # 2: another colour
        image = [] if messages else [{"type": "image"}]
        messages.append({"role": "user", "content": [*image, {"type": "text", "text": question.row()["prompt"]}]})
        answer = f"<think>{sought}</think><answer>{question.picture.count(sought)}</answer>"
        messages.append({"role": "assistant", "content": answer})
    names = TOKENIZER.decode([NAMES[("", *SHAPES).index(shape)] for shape in asked[0].picture[:-1]])
    conversation = TOKENIZER.apply_chat_template(messages, tokenize=False)
    ids, mask = written(TOKENIZER, conversation.replace("<|image_pad|>", f"<|image_pad|>{names}"))
    return ids, [int(is_learned or token in NAMES) for token, is_learned in zip(ids, mask, strict=True)]


def rebuild(folder: Path, seed: int = 0, progress: Progress = lambda sentence: None, steps: int = STEPS) -> None:
    from mlx_vlm.models import qwen3_vl
    from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLImageProcessor

    class Reader(qwen3_vl.Model):
        """mlx-vlm's model, which reads the pictures of a batch along with its tokens."""

        def __call__(self, tokens_BL: mx.array) -> mx.array:
            is_name = (tokens_BL >= NAMES[0]) & (tokens_BL <= NAMES[-1])
            return super().__call__(mx.where(is_name, config["image_token_id"], tokens_BL), **pixels).logits

    config, of_tokenizer, of_images = (json.loads((MODEL / name).read_text(encoding="utf-8")) for name in FILES)
    mx.random.seed(seed)
    model, processor = Reader(qwen3_vl.ModelConfig.from_dict(deepcopy(config))), Qwen3VLImageProcessor(**of_images)
    rng, splits, pixels = random.Random(f"warm-up {seed}"), pools(seed), dict[str, mx.array]()

    def batch() -> list[Example]:
        asked = [questions(rng) for _ in range(ROWS)]
        read = processor([drawn(part[0].picture, rng) for part in asked])
        pixels.update({name: mx.array(array) for name, array in read.items()})
        return [encode(part, lambda: rng.random() < CAREFUL_SHARE) for part in asked]

    demo.warm_up(model, batch, steps, progress)
    demo.write(folder, model, TOKENIZER, dict(zip(FILES, (config, of_tokenizer, of_images), strict=True)), splits)
    (folder / "data" / "pictures").mkdir(exist_ok=True)
    for question in {question.file: question for part in splits.values() for question in part}.values():
        drawn(question.picture, random.Random(question.file)).save(folder / "data" / question.file, optimize=True)
    progress(f"The model and data of the demo with images are in {folder}.")


if __name__ == "__main__":
    rebuild(resources() / "shapes", progress=print)
