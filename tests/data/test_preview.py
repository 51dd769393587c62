"""The answers behind the Dataset page: rows, columns, splits, errors, and the very tokens of training."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from backend.config.config import parse
from backend.data import files, preview
from backend.data.problems import PromptFormat
from backend.data.prompts import TokenizedPrompts
from backend.data.rows import read_splits
from backend.rewards.allowed_code import allow_named
from backend.serve import dataset_questions
from backend.serve.questions import QUESTIONS, Cancelled, QuestionCall, handler
from tests.data.test_rows import write as write_rows
from tests.support.random_models import tiny_tokenizer
from tests.support.small_run import check, settings_for

ROWS = [
    {"question": "What is 1 plus 1?", "solution": "2", "topic": "sums"},
    {"question": "What is 1 plus 2?", "solution": "", "topic": "sums"},
    {"question": "What is 1 plus 1?", "solution": "2", "topic": "sums"},
]
MAPPED = {"prompt_feature": "question", "answer_feature": "solution"}


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    return write_rows(path, rows)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_tokenizer(tmp_path / "model-files")  # a preview needs only the tokenizer of a model


@pytest.fixture
def ask(tmp_path: Path, model: Path):
    """Call the handler of a question as the event loop of `serve` does."""
    (model / "config.json").write_text("{}")

    def ask_backend(question: str, settings: dict[str, Any], **more: Any) -> Any:
        call = QuestionCall()
        settings = {"model": str(model)} | settings
        more = more if question in ("preview", "preview_choices") else {"split": "train"} | more
        return handler(question, *QUESTIONS[question])(call, settings=settings, **more)

    return ask_backend


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_overview_of_a_file_of_each_suffix(ask, tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"rows{suffix}")
    overview = ask("preview", MAPPED | {"data": str(file)})
    assert (overview["absent"], overview["form"], overview["faults"], overview["likely"]) == (False, "file", [], {})
    counts = {"rows": 3, "about": None, "source": str(file), "unanswered": 1, "repeated": 1}
    assert overview["splits"] == {"train": counts}
    columns = [(column["name"], column["kind"], column["example"]) for column in overview["columns"]]
    assert columns == [("question", "text", "What is 1 plus 1?"), ("solution", "text", "2"), ("topic", "text", "sums")]
    rows = ask("preview_rows", MAPPED | {"data": str(file)}, numbers=range(1, 100))
    assert [row["cells"] for row in rows] == ROWS[1:]


def test_each_column_has_the_kind_of_its_cells(ask, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes?"}]
    rows = [{"prompt": chat, "answer": None, "n": 1, "yes": True, "tags": ["a"], "more": {"b": 1}}]
    data = str(write(tmp_path / "rows.jsonl", rows=rows))
    kinds = [column["kind"] for column in ask("preview", {"data": data})["columns"]]
    assert kinds == ["answered messages", "empty", "number", "yes or no", "list", "object"]
    cells = ask("preview_rows", {"data": data}, numbers=[0])[0]["cells"]
    assert cells["prompt"] == "user: Hello\nassistant: Yes?" and cells["answer"] == "" and cells["more"] == '{"b": 1}'


def test_chats_that_end_in_the_answer_are_not_offered_as_prompts(ask, tmp_path: Path) -> None:
    """GRPO learned to copy the answer out of its prompt."""
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    for turns, likely in ((2, {}), (1, {"prompt_feature": "messages"})):
        data = str(write(tmp_path / f"{turns}.jsonl", rows=[{"messages": chat[:turns], "answer": "2"}]))
        assert ask("preview", {"data": data})["likely"] == likely


def test_a_file_is_read_again_only_when_it_changes(ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    monkeypatch.setattr(preview, "read_splits", lambda *a, **k: reads.append(a[0].data) or read_splits(*a, **k))
    file = write(tmp_path / "rows.jsonl")
    for _ in range(3):
        ask("preview", MAPPED | {"data": str(file)})
        ask("preview_rows", MAPPED | {"data": str(file)}, numbers=[0])
    assert len(reads) == 1
    before = ask("preview", MAPPED | {"data": str(file)})["written"]
    write(file, ROWS[:1])
    after = ask("preview", MAPPED | {"data": str(file)})
    assert after["splits"]["train"]["rows"] == 1 and after["written"] != before and len(reads) == 2


def break_json(folder: Path) -> dict[str, Any]:
    (folder / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", \n')
    return {"data": str(folder / "broken.jsonl")}


FAULTS = {
    "missing file": lambda folder: {"data": str(folder / "none.jsonl")},
    "no kind of ours": lambda folder: {"data": str((folder / "a.txt").write_text("x") and folder / "a.txt")},
    "broken JSON": break_json,
    "empty file": lambda folder: {"data": str(write(folder / "empty.jsonl", rows=[]))},
    "no such column": lambda folder: {"data": str(write(folder / "c.jsonl"))},
    "no such answer": lambda folder: {"data": str(write(folder / "c.jsonl")), **MAPPED, "answer_feature": "gold"},
    "no such type": lambda folder: {"data": str(write(folder / "c.jsonl")), **MAPPED, "type_feature": "kind"},
    "no such split": lambda folder: {"data": str(write(folder / "train.jsonl").parent), "valid_split": "exam"} | MAPPED,
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_have_the_sentences_of_check(ask, tmp_path: Path, case: str) -> None:
    settings = settings_for(tmp_path / "check") | FAULTS[case](tmp_path)
    overview = ask("preview", settings)
    faults = [fault.to_dict() for fault in check(settings)]
    assert faults and overview["faults"] == faults


def test_a_row_without_a_prompt_is_counted_with_the_sentence_of_check(ask, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": " ", "answer": "2"}, {"answer": "3"}]
    settings = settings_for(tmp_path / "check") | {"data": str(write(tmp_path / "rows.jsonl", rows=rows))}
    counts = ask("preview_counts", settings)
    assert (counts["refused"], counts["seen"], counts["rows"]) == (2, 3, 3)
    assert counts["faults"] == [fault.to_dict() for fault in check(settings)]
    row = ask("preview_row", settings, index=2)
    assert "row 3 of" in row["faults"][0]["sentence"]
    assert row["cells"] == [{"name": "answer", "kind": "text", "text": "3"}]


TURNS = (("user", "日本語, and half a line\n"), ("assistant", "so"), ("user", "<|im_end|> in the text"))
CHATS = [
    {"prompt": "What is 17 plus 25?", "answer": 42, "kind": "sum", "sys": "Be brief."},
    {"prompt": [{"role": role, "content": content} for role, content in TURNS]},
    {"prompt": "x " * 900, "answer": "long"},
]


def test_the_preview_shows_the_tokens_of_training(ask, tmp_path: Path, model: Path) -> None:
    settings = settings_for(tmp_path / "run") | {"data": str(write(tmp_path / "rows.jsonl", rows=CHATS))}
    settings |= {"system_feature": "sys", "type_feature": "kind", "system_prompt": "Think first."}
    settings |= {"chat_template_kwargs": {"enable_thinking": True}, "max_seq_length": 4000}
    config = parse(settings)
    tokenizer = preview.tokenizer_for(config)
    trained = TokenizedPrompts(read_splits(config).train, tokenizer, PromptFormat.of(config), "rows")
    for index, chat in enumerate(CHATS):
        row, problem = ask("preview_row", settings, index=index), trained[index]
        assert problem is not None
        assert [token for piece in row["pieces"] for token in piece["ids"]] == problem.tokens
        assert row["tokens"] == len(problem.tokens) and row["messages"] == problem.messages
        assert "".join(piece["text"] for piece in row["pieces"]) == tokenizer.decode(problem.tokens)
        assert (row["answer"], row["type"]) == (problem.answer, chat.get("kind"))
    lengths = [len(problem.tokens) for problem in trained if problem]
    assert dict(ask("preview_counts", settings)["lengths"]) == dict.fromkeys(lengths, 1)
    assert [row["tokens"] for row in ask("preview_rows", settings, numbers=range(3))] == lengths


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("", "No model is chosen yet, so there are no tokens to show."),
        ("owner/not-here", "The model owner/not-here is not on this machine yet, so there are no tokens to show."),
        (
            "/no/such/model",
            "There is no model /no/such/model: it is neither a folder nor an owner/name id on Hugging F",
        ),
    ],
)
def test_without_the_model_there_are_no_tokens(ask, tmp_path: Path, name: str, sentence: str) -> None:
    rows = [*ROWS, {"question": "word " * 100_000, "solution": "9" * 100_000}]
    settings = MAPPED | {"data": str(write(tmp_path / "rows.jsonl", rows)), "model": name}
    long = ask("preview_row", settings, index=3)
    shown = len(long["messages"][0]["content"]), len(long["answer"])
    assert shown == (20_000, 20_000), "a text edit lays out a page of a million characters for a second"
    row, counts = ask("preview_row", settings, index=0), ask("preview_counts", settings)
    assert row["tokens"] is None and row["messages"] == [{"role": "user", "content": "What is 1 plus 1?"}]
    (fault,) = row["faults"]
    assert fault["setting"] == "model" and fault["sentence"].startswith(sentence)
    assert counts["no_tokens"] == fault["sentence"] and counts["seen"] == 4
    assert [row["tokens"] for row in ask("preview_rows", settings, numbers=range(3))] == [None] * 3


def test_a_cancelled_count_continues_where_it_stopped(ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "word " * (1 + n % 7), "answer": "1"} for n in range(400)]
    settings = {"data": str(write(tmp_path / "rows.jsonl", rows=rows))}
    assert ask("preview_counts", settings, most=50)["seen"] == 50
    measured: list[int] = []
    tokenize = preview.preview_problem
    monkeypatch.setattr(preview, "preview_problem", lambda *a: measured.append(a[0]) or tokenize(*a))
    monkeypatch.setattr(dataset_questions, "REPORT_EVERY_S", 0.0)
    call = QuestionCall()
    call.report = lambda said: call.cancel() if said["seen"] > 150 else None
    with pytest.raises(Cancelled):
        dataset_questions.preview_counts(call, settings=settings | {"model": ""}, split="train")
    measured.clear()
    ask("preview_counts", settings | {"model": ""})
    assert 0 < len(measured) < 250 and len(set(measured)) == len(measured), "no row is measured twice"


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    monkeypatch.setattr(preview, "_opened", None)
    return tmp_path


def test_a_dataset_that_is_not_cached_is_not_downloaded(ask, caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "read_splits", lambda config: pytest.fail("it was read"))
    assert ask("preview", {"data": "owner/MySums"}) == {"absent": True}
    (caches / "hub" / "datasets--owner--MySums" / "blobs").mkdir(parents=True)
    assert ask("preview", {"data": "owner/MySums"}) == {"absent": True}, "a download that never ended"


@pytest.mark.parametrize("cache", ["hub/datasets--owner--MySums/snapshots", "datasets/owner___my_sums"])
def test_a_dataset_in_a_cache_is_read(ask, caches: Path, monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    """`datasets` would query the network, so its `load_dataset` is replaced."""
    import datasets

    (caches / cache).mkdir(parents=True)
    loaded: list[Any] = []
    splits = {"train": ROWS, "test": ROWS[:1]}
    dataset = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()})
    monkeypatch.setattr(datasets, "load_dataset", lambda *which: loaded.append(which) or dataset)
    overview = ask("preview", MAPPED | {"data": "owner/MySums", "dataset_config": "main"})
    assert loaded == [("owner/MySums", "main")] and overview["form"] == "hub"
    splits = {split: (about["rows"], about["source"]) for split, about in overview["splits"].items()}
    assert splits == {"train": (3, "owner/MySums, train"), "test": (1, "owner/MySums, test")}


def test_a_hundred_thousand_rows_are_previewed_in_two_seconds(ask, tmp_path: Path) -> None:
    """CPU seconds, not wall time: the machine may be busy."""
    line = json.dumps({"question": "What is the sum of %d and 4, and why is it so?", "solution": "12", "id": 1})
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(line.replace("%d", str(n)) for n in range(100_000)))
    settings = MAPPED | {"data": str(file)}
    began = time.process_time()
    overview = ask("preview", settings)
    ask("preview_rows", settings, numbers=range(100))
    first = time.process_time() - began
    assert overview["splits"]["train"]["rows"] == 100_000
    assert first < 2.0, f"the first rows took {first:.1f} s"
    preview.tokenizer_for(preview.settings_of({"model": ""} | settings | {"model": str(tmp_path / "model-files")}))
    began = time.process_time()
    for start in range(0, 100_000, 10_000):
        assert ask("preview_rows", settings, numbers=range(start, start + 100))[0]["tokens"]
    per_page_s = (time.process_time() - began) / 10
    assert per_page_s < 0.1, f"a part of the table took {per_page_s * 1e3:.0f} ms"


def test_the_rows_of_a_large_file_are_estimated(ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LARGE_TEXT", 10_000), ("LARGE_PARQUET", 1_000), ("HEAD_ROWS", 40)):
        monkeypatch.setattr(files, name, value)
    rows = [{"question": f"What is {n:06}?", "solution": str(n)} for n in range(1000)]
    for suffix in (".jsonl", ".csv", ".parquet"):
        file = write(tmp_path / f"large{suffix}", rows)
        split = ask("preview", MAPPED | {"data": str(file)})["splits"]["train"]
        assert split["rows"] == 40 and 900 < split["about"] < 1100, suffix
        assert len(ask("preview_rows", MAPPED | {"data": str(file)}, numbers=range(100))) == 40


def test_a_labelled_row_tells_what_is_learnt(ask, tmp_path: Path, model: Path) -> None:
    """The answer, and not the prompt; a longer row loses its end, as in training."""
    rows = [{"prompt": "What is 1 plus 1?", "completion": "It is 2."}]
    settings = {"model": str(model), "data": str(write(tmp_path / "rows.jsonl", rows)), "train_mode": "sft"}
    row = ask("preview_row", settings, split="train", index=0)
    parts = {is_learnt: [p["text"] for p in row["pieces"] if p["learnt"] is is_learnt] for is_learnt in (True, False)}
    assert "".join(parts[True]).startswith("It is 2.") and "1 plus 1" in "".join(parts[False])
    counts = ask("preview_counts", settings, split="train", most=None)
    assert dict(counts["lengths"]) == {row["tokens"]: 1}, "of the whole row"
    cut = ask("preview_row", settings | {"max_seq_length": row["tokens"] - 2}, split="train", index=0)
    assert (cut["tokens"], cut["kept"]) == (row["tokens"], row["tokens"] - 2)


def test_another_way_of_training_reads_the_rows_anew(ask, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "What is 1 plus 1?"}, {"role": "assistant", "content": "2"}]
    settings: dict[str, Any] = {"data": str(write(tmp_path / "rows.jsonl", rows=[{"messages": chat}] * 3))}
    assert [fault["setting"] for fault in ask("preview", settings)["faults"]] == ["prompt_feature", "answer_feature"]
    assert ask("preview_counts", settings)["refused"] == 3 and ask("preview_variety", settings)["rows"] == 0
    settings |= {"train_mode": "sft", "reward_functions": []}
    overview = ask("preview", settings)
    assert overview["faults"] == [] and overview["likely"] == {}, "no answer is compared, and the chats have a use"
    assert ask("preview_counts", settings)["refused"] == 0 and ask("preview_variety", settings)["rows"] == 3

    def learnt(**changes: Any) -> int:
        return sum(
            len(each["ids"]) for each in ask("preview_row", settings | changes, index=0)["pieces"] if each["learnt"]
        )

    assert learnt() < learnt(mask_prompt=False)
    (fault,) = ask("preview", MAPPED | {"data": str(write(tmp_path / "others.jsonl")), "warmup_steps": 2})["faults"]
    assert fault["setting"] == "completion_feature", "as check says of a warm-up on labels"


def test_a_row_is_shown_as_it_is_cut(ask, tmp_path: Path) -> None:
    file = write(tmp_path / "long.jsonl", [{"question": "word " * 50 + "the end", "solution": "1"}])
    settings = MAPPED | {"data": str(file), "max_prompt_length": 40, "long_prompts": "cut_left"}
    row = ask("preview_row", settings, index=0)
    assert row["kept"] == sum(len(piece["ids"]) for piece in row["pieces"]) <= 40 < row["tokens"]
    assert "".join(piece["text"] for piece in row["pieces"]).count("the end") == 1
    assert ask("preview_row", settings | {"long_prompts": "leave_out"}, index=0)["kept"] is None


def test_a_map_function_is_previewed_once_its_file_may_run(ask, tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text(
        "from backend.rewards import register_map_function\n@register_map_function\ndef f(row):\n"
        "    return row | {'solution': 'mapped'} if row['solution'] != '0' else None\n"
    )
    file = write(tmp_path / "rows.jsonl", [{"question": "?", "solution": str(n)} for n in range(3)])
    settings = MAPPED | {"data": str(file), "map_function": "f", "reward_functions_file": str(code)}
    refused = ask("preview", settings)
    assert refused["splits"]["train"]["rows"] == 3
    assert refused["faults"][-1]["sentence"].startswith("mine.py has not been allowed to run yet")
    allow_named({"reward_functions_file": str(code)})
    try:
        allowed = ask("preview", settings)
        assert allowed["splits"]["train"]["rows"] == 2 and allowed["faults"] == []
        (note,) = allowed["notes"]
        assert note.startswith("1 of 3 rows of train are left out: the map function f returned None")
        assert ask("preview_rows", settings, numbers=[0])[0]["cells"]["solution"] == "mapped"
    finally:
        dataset_questions.close()
