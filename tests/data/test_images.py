"""Images of rows: columns, parts, files of every kind, broken ones, and their tokens in the prompt."""

import io
import json
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from backend.cli.check import longest_prompt
from backend.config.config import Config, parse
from backend.data.files import read_file
from backend.data.labels import LabelledRows
from backend.data.problems import PromptFormat
from backend.data.prompts import TokenizedPrompts
from backend.data.rows import Rows, read_splits
from backend.models.tokenizers import load_tokenizer
from backend.rewards.scoring import TrainerState, inputs_for, with_pictures
from backend.serve.dataset_questions import preview_row
from backend.serve.questions import QuestionCall
from backend.trainer.library.training import write_dataset
from backend.training.self_distillation import add_teacher_prompts
from backend.types import Completion, Group
from backend.utils.errors import UserError
from backend.utils.places import preferences_folder
from backend.vision.tokenizer import VisionTokenizer, with_vision
from tests.data.test_rows import settings
from tests.support.random_models import tiny_tokenizer
from tests.support.vision_models import FAMILIES, IMAGE_TOKEN, picture, tiny_vision_model

QUESTION = "What is 2 plus 3?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> VisionTokenizer:
    return with_vision(load_tokenizer(model), model, 401_408)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset's folder with two pictures, of 12 tokens each."""
    picture(tmp_path / "data" / "pictures" / "a.png")
    picture(tmp_path / "data" / "b.png", 48, 64, seed=1)
    return tmp_path / "data"


def prompts(rows: Rows, tokenizer: Any, folder: Path, **raw: Any) -> TokenizedPrompts:
    return TokenizedPrompts(rows, tokenizer, PromptFormat.of(settings(**raw)), str(folder / "train.jsonl"))


def image(path: Path | str | None = None) -> dict[str, Any]:
    return {"type": "image"} | ({} if path is None else {"image": str(path)})


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def png(size: tuple[int, int] = (64, 48), kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, "red").save(stream, kind)
    return stream.getvalue()


A, B = Path("pictures/a.png"), Path("b.png")


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"prompt": QUESTION, "image": str(A)}, [A, QUESTION]),
        ({"prompt": QUESTION, "images": [str(A), str(B)]}, [A, B, QUESTION]),
        ({"prompt": user(text("left "), image(), text("right"), image()), "images": [str(B), str(A)]}, None),
        ({"prompt": user(image(A), text(QUESTION))}, [A, QUESTION]),
        ({"prompt": user(image(A), text(QUESTION)), "image": str(A)}, [A, QUESTION]),
        ({"prompt": user(image() | {"text": None, "image": None}, text(QUESTION)), "image": str(B)}, [B, QUESTION]),
        ({"prompt": [{"role": "user", "content": QUESTION}], "image": {"bytes": None, "path": str(A)}}, [A, QUESTION]),
    ],
    ids=str,
)
def test_images_stand_where_their_parts_are_or_before_the_text(
    tokenizer: VisionTokenizer, folder: Path, row: dict[str, Any], parts: list[Any] | None
) -> None:
    (problem,) = prompts([row], tokenizer, folder).first(-1)
    parts = ["left ", B, "right", A] if parts is None else parts
    made = [image(folder / part) if isinstance(part, Path) else text(part) for part in parts]
    assert problem.messages == user(*made)
    assert problem.images == [part["image"] for part in made if "image" in part]
    assert problem.prompt == "".join(part.get("text", "") for part in made)
    assert problem.tokens.count(IMAGE_TOKEN) == 12 * len(problem.images)


def test_bytes_and_images_of_pil_are_written_once(tokenizer: VisionTokenizer, folder: Path) -> None:
    cells = [png(), {"bytes": png(), "path": "x.png"}, Image.new("RGB", (64, 48), "red"), {"bytes": png((99, 48))}]
    problems = prompts([{"prompt": QUESTION, "image": cell} for cell in cells], tokenizer, folder).first(-1)
    assert len({problem.images[0] for problem in problems}) == len([*(preferences_folder() / "images").iterdir()]) == 2
    assert [problem.row["image"] for problem in problems] == [problem.images[0] for problem in problems]
    json.dumps([problem.row for problem in problems])


def test_rows_of_a_program_hold_images(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # from which a relative path is meant
    first = {"prompt": "?", "images": [Image.open("b.png"), "b.png"]}
    write_dataset([first, {"prompt": [{"role": "user", "content": [image()]}], "image": png()}], tmp_path / "own")
    rows = read_file(tmp_path / "own" / "train.jsonl")
    assert rows[0]["images"][1] == str(folder / "b.png")
    assert all(Path(path).is_absolute() for path in [*rows[0]["images"], rows[1]["image"]])


@pytest.mark.parametrize(("column", "streaming"), [("image", False), ("images", False), ("image", True)])
def test_rows_of_the_hub_and_of_parquet_hold_no_images_in_memory(
    tokenizer: VisionTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, streaming: bool
) -> None:
    import datasets  # takes a second, in each worker of the suite

    cells = [{"bytes": png((64 + i, 48)), "path": "x.png"} for i in range(3)]
    columns = {"prompt": [QUESTION] * 3, column: [[cell] for cell in cells] if column == "images" else cells}
    kind = datasets.Image() if column == "image" else datasets.List(datasets.Image())
    kinds = datasets.Features({"prompt": datasets.Value("string"), column: kind})
    dataset = datasets.Dataset.from_dict(columns, features=kinds)
    monkeypatch.setattr("backend.data.hub_rows._loaded", lambda *_: datasets.DatasetDict({"train": dataset}))
    dataset.to_parquet(tmp_path / "train.parquet")
    for data in ("owner/pictures", str(tmp_path)):
        splits = read_splits(settings(data=data, streaming=streaming))
        if not streaming and data == str(tmp_path):
            assert "bytes" not in str(splits.train)
        made = TokenizedPrompts(splits.train, tokenizer, PromptFormat.of(settings()), splits.source["train"]).first(-1)
        assert [Image.open(problem.images[0]).width for problem in made] == [64, 65, 66]


def test_map_functions_get_paths(tokenizer: VisionTokenizer, folder: Path) -> None:
    seen: list[Any] = []

    def map_rows(name: str, rows: Any, where: Any) -> Any:
        seen.extend(row["image"] for row in rows)
        return [row | {"prompt": "mapped"} for row in rows]

    (folder / "train.jsonl").write_text(json.dumps({"prompt": QUESTION, "image": str(A)}))
    (row,) = read_splits(settings(data=str(folder), map_function="f", reward_functions_file="f.py"), map_rows).train
    assert seen == [row["image"]] == [str(folder / A)]


def broken(folder: Path) -> None:
    huge = bytearray(png())
    huge[16:24] = (60_000).to_bytes(4) * 2  # width and height
    huge[29:33] = zlib.crc32(huge[12:29]).to_bytes(4)
    files = {"empty.png": b"", "text.png": b"a red circle", "cut.png": (folder / "b.png").read_bytes()[:200]}
    files |= {"cut.jpg": png(kind="JPEG")[:-40], "cut.gif": png(kind="GIF")[:-10], "huge.png": bytes(huge)}
    for name, content in (files | {"drawing.svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>"}).items():
        (folder / name).write_bytes(content)
    picture(folder / "thin.png", 1000, 2)


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ({"image": "missing.png"}, "image of row 2 of train.jsonl: There is no picture missing.png."),
        ({"image": "pictures"}, "pictures cannot be read: it is a folder."),
        ({"image": "empty.png"}, "empty.png cannot be read: it is empty."),
        ({"image": "text.png"}, "text.png cannot be read: it is none of JPEG, PNG,"),
        ({"image": "drawing.svg"}, "drawing.svg cannot be read: it is none of JPEG, PNG,"),
        ({"image": "cut.png"}, "cut.png cannot be read: image file is truncated"),
        ({"image": "cut.jpg"}, "cut.jpg cannot be read: image file is truncated ("),
        ({"image": "cut.gif"}, "cut.gif cannot be read: image file is truncated ("),
        ({"image": "huge.png"}, "huge.png cannot be read: Image size (3600000000 pixels) exceeds limit"),
        ({"image": "thin.png"}, "refuses a picture (1000 × 2 pixels): absolute aspect ratio must be smaller than 200"),
        ({"image": "a\0b"}, "The picture a\\x00b cannot be read: embedded null byte."),
        ({"image": "https://example.com/a.png"}, "row 2 of train.jsonl holds an address, https://example.com/a.png;"),
        ({"image": "data:image/png;base64,AAAA"}, "row 2 of train.jsonl holds an address, data:image/png;base64,AAAA;"),
        ({"image": 7}, "image of row 2 of train.jsonl holds 7, not the path or bytes of an image."),
        ({"image": {"url": "x"}}, "image of row 2 of train.jsonl holds {'url': 'x'}, not the path"),
        ({"image": b""}, "image of row 2 of train.jsonl holds nothing, not the path"),
        ({"images": ["b.png", None]}, "images of row 2 of train.jsonl holds nothing, not the path"),
        ({"images": ["b.png", ""]}, "images of row 2 of train.jsonl holds nothing, not the path"),
        ({"image": "b.png", "images": ["b.png"]}, "Both columns image and images of row 2 of train.jsonl have images;"),
        ({"prompt": user(image(), text("x"))}, "do not match: 0 in its columns, for 1 image parts of its"),
        ({"prompt": user(image(), text("x")), "images": ["b.png"] * 2}, "match: 2 in its columns, for 1 image parts"),
        ({"prompt": user(image("b.png")), "images": ["pictures/a.png"]}, "match: 1 in its columns, for 0 image"),
        ({"prompt": user(image("no.png"), text("x"))}, "prompt of row 2 of train.jsonl: There is no picture no"),
        ({"prompt": user({"type": "video"})}, 'of row 2 of train.jsonl is of the type "video"; only text and image'),
        ({"prompt": [{"role": "assistant", "content": "x"}], "image": "b.png"}, "no message of the user in row 2 of"),
        ({"prompt": "a <|image_pad|> b", "image": "b.png"}, "2 image markers <|image_pad|> for 1 images"),
    ],
    ids=str,
)  # fmt: skip
def test_broken_images_have_one_message(
    tokenizer: VisionTokenizer, folder: Path, cells: dict[str, Any], says: str
) -> None:
    broken(folder)
    with pytest.raises(UserError) as caught:
        prompts([{"prompt": "hi"}, {"prompt": QUESTION} | cells], tokenizer, folder).first(-1)
    (fault,) = caught.value.faults
    sentence = re.sub(r"(?<= )/\S*/", "", fault.sentence)  # folders
    assert says in sentence and "row 2 of train.jsonl" in sentence.lower()
    assert fault.setting in ("data", "prompt_feature") and len(fault.sentence) < 300


def test_rows_of_the_hub_name_no_file_outside(tokenizer: VisionTokenizer, folder: Path) -> None:
    form = PromptFormat.of(settings())
    for path, says in (
        (str(folder / A), "names a file that is not part of the dataset"),
        ("b.png", "no picture b.png"),
    ):
        with pytest.raises(UserError, match=says):
            TokenizedPrompts([{"prompt": "hi", "image": path}], tokenizer, form, "owner/data, train")


def test_models_without_eyes_refuse_images(tokenizer: VisionTokenizer, folder: Path, tmp_path: Path) -> None:
    row = {"prompt": QUESTION, "image": str(A)}
    blind = load_tokenizer(tiny_tokenizer(tmp_path / "blind"))
    with pytest.raises(UserError, match=r"^model: There are images in row 1 of .*, and the model reads only text"):
        prompts([row], blind, folder).first(-1)
    assert prompts([row | {"image": None}, row | {"image": ""}, {"prompt": "x", "images": []}], blind, folder).first(-1)


def test_long_prompts_with_images_are_left_out_and_counted(tokenizer: VisionTokenizer, folder: Path) -> None:
    rows = [{"prompt": f"{QUESTION} " * 9, "images": [str(B)] * count} for count in (0, 1, 9)]
    limit = {"max_seq_length": 300, "max_completion_length": 100, "max_prompt_length": 170}
    most = prompts(rows, tokenizer, folder, **limit, long_prompts="cut_left")
    assert [problem and problem.tokens.count(IMAGE_TOKEN) for problem in (most[0], most[1], most[2])] == [0, 12, None]
    assert most.too_long == 1 and "1 of 3 rows of the train split are left out" in most.too_long_note("train")
    chat = [{"role": "assistant", "content": "5 " * 90}]
    form = PromptFormat.of(settings(max_seq_length=100, max_completion_length=50), labelled=True)
    labelled = [{"prompt": QUESTION, "completion": chat, "images": [str(B)] * count} for count in (0, 1)]
    made = LabelledRows(labelled, tokenizer, form, str(folder / "train.jsonl"))
    assert [made[0] is None, made[1] is None, made.cut, made.too_long] == [False, True, 1, 1]


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_pixels_are_those_of_mlx_vlm(family: str, tmp_path: Path) -> None:
    from mlx_vlm.utils import load_processor, prepare_inputs

    model = tiny_vision_model(tmp_path, family)
    tokenizer = with_vision(load_tokenizer(model), model, 401_408)
    paths = [picture(tmp_path / "a.png"), picture(tmp_path / "b.png", 100, 40)]
    ids = tokenizer.apply_chat_template(user(*map(image, paths), text("hi")), add_generation_prompt=True)
    rendered = tokenizer._wrapped.apply_chat_template(
        user(image(), image(), text("hi")), add_generation_prompt=True, tokenize=False
    )
    expected = prepare_inputs(load_processor(model, False), images=paths, prompts=[rendered])
    assert ids == expected["input_ids"].tolist()[0]
    assert ids.count(IMAGE_TOKEN) == sum(map(tokenizer.tokens_of, paths))
    pixels = tokenizer.pixels(paths)
    for name, value in pixels.items():
        assert isinstance(value, mx.array) and np.allclose(np.array(value), np.array(expected[name]))
    assert {*pixels} == {*expected} - {"input_ids", "attention_mask"}
    plain = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(plain) == tokenizer._wrapped.apply_chat_template(plain)


def test_templates_that_read_only_parts_get_parts(model: Path, folder: Path) -> None:
    tokenizer = with_vision(load_tokenizer(model), model, 401_408)
    template = "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}<|image_pad|>{% endif %}"
    tokenizer._tokenizer.chat_template = template + "{{ part.text }}{% endfor %}{% endfor %}"
    rows = [{"prompt": "hi there"}, {"prompt": "hi there", "image": str(A)}]
    blind, seeing = prompts(rows, tokenizer, folder).first(-1)
    assert tokenizer.decode(blind.tokens) == "hi there"
    assert seeing.tokens == [IMAGE_TOKEN] * 12 + blind.tokens and seeing.prompt == blind.prompt


def test_large_images_are_scaled_and_turned(model: Path, tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", 64, 48)
    small = with_vision(load_tokenizer(model), model, 1024)
    assert small.tokens_of(path) == 2
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(path) as upright:
        upright.save(tmp_path / "turned.jpg", exif=exif)
    grids = [small.pixels([name])["image_grid_thw"].tolist()[0] for name in (path, str(tmp_path / "turned.jpg"))]
    assert grids[0][1:] == grids[1][:0:-1]


def test_reward_functions_get_images_as_in_trl(tokenizer: VisionTokenizer, folder: Path) -> None:
    rows = [
        {"prompt": user(image(A), text(QUESTION))},
        {"prompt": [{"role": "user", "content": "x"}], "images": [str(B)] * 2},
    ]
    problems = prompts(rows, tokenizer, folder).first(-1)
    samples = [(problem, Completion([1], [0.0], "5", "eos")) for problem in problems]
    given = with_pictures(inputs_for(samples, TrainerState(), "trl"))
    assert given["images"][0] is None and [each.size for each in given["images"][1]] == [(48, 64)] * 2
    assert with_pictures(inputs_for(samples, TrainerState(), "ours"))["prompts"] == [QUESTION, "x"]
    assert problems[0].images == [str(folder / A)]


def test_a_teacher_sees_the_images(tokenizer: VisionTokenizer, folder: Path) -> None:
    (problem,) = prompts([{"prompt": QUESTION, "image": str(A)}], tokenizer, folder).first(-1)
    solved = [Completion([1], [0.0], "5", "eos", reward=1.0), Completion([2], [0.0], "6", "eos", reward=0.0)]
    config = Config()
    add_teacher_prompts([Group(problem, solved)], config, tokenizer, PromptFormat.of(config))
    assert solved[1].teacher_prompt.count(IMAGE_TOKEN) == 12


def test_preview_and_estimate_count_image_tokens(model: Path, folder: Path) -> None:
    (folder / "train.jsonl").write_text(json.dumps({"prompt": QUESTION, "images": [str(A), str(B)]}))
    raw = {"model": str(model), "data": str(folder)}
    answer = preview_row(QuestionCall(), settings=raw, split="train", index=0)
    assert answer["faults"] == [] and answer["messages"][0]["content"] == QUESTION
    assert answer["images"] == [{"path": str(folder / path), "tokens": 12} for path in (A, B)]
    assert [piece["text"] for piece in answer["pieces"]].count("<|image_pad|> × 12") == 2
    longest, images = longest_prompt(parse(raw | {"reward_functions": ["r1_int_reward_func"]}), model)
    assert images == 24 and longest is not None and longest >= answer["tokens"]


def test_without_mlx_vlm_the_install_line_is_named(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx_vlm.utils", None)
    tokenizer = with_vision(load_tokenizer(model), model, 401_408)
    with pytest.raises(UserError, match=r'^data: .*pip install "grpo-studio\[vision\]"'):
        prompts([{"prompt": QUESTION, "image": str(A)}], tokenizer, folder).first(-1)
