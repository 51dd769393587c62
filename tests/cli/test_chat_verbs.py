"""`generate` and `chat` in the terminal."""

import json
from pathlib import Path
from typing import Any

import pytest

from backend.cli import chat as chat_session
from backend.cli.chat import COMMANDS
from tests.support.trained_run import make_run
from tests.support.verbs import call, refused
from tests.support.vision_models import picture, tiny_vision_model

GREEDY = ("--temperature", "0", "--max-tokens", "12")


@pytest.fixture(scope="module")
def run(models: Path) -> Path:
    return make_run(models / "run", models, (1.0, 2.0)).path


def test_generate_prints_the_answer_and_nothing_else(run: Path):
    tuned, base = (call("generate", run, "--prompt", "Hi", *GREEDY, *side) for side in ((), ("--base",)))
    assert tuned.exit_code == base.exit_code == 0
    assert tuned.stdout and base.stdout and tuned.stdout != base.stdout
    both = call("generate", run, "--prompt", "Hi", *GREEDY, "--both").stdout
    assert both == f"base\n{base.stdout}tuned\n{tuned.stdout}"
    assert call("generate", run, "--prompt", "-", *GREEDY, keys="Hi").stdout == tuned.stdout


def test_generate_ends_with_a_line_of_json(run: Path):
    result = call("generate", run, "--row", 4, "--both", "--json", "--score", "--seed", 5, "--checkpoint", "8", *GREEDY)
    line: dict[str, Any] = json.loads(result.stdout)
    assert (line["prompt"], line["seed"], line["checkpoint"]) == ("What is 3 plus 3?", 5, 8)
    assert list(line["answers"]) == ["base", "tuned"]
    answer = line["answers"]["tuned"]
    assert answer["tokens"] <= 12 and set(answer["rewards"]) == {"r1_int_reward_func", "r1_count_xml"}
    assert answer["reward"] == answer["rewards"]["r1_int_reward_func"] + 0.5 * answer["rewards"]["r1_count_xml"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "prompt: Give a prompt with --prompt, or a row of the test split with --row."),
        ("--prompt a --row 1", "prompt: Give a prompt"),
        ("--row 1 --image a.png", "image: A row of the test split has its own pictures"),
        ("--prompt a --image a.png", "model: There are images in this prompt, and the model reads only text"),
        ("--prompt=", "prompt: The prompt is empty."),
        ("--row 9", "rows 1 to 8, and no row 9."),
        ("--prompt a --temperature -1", "temperature: "),
        ("--prompt a --top-p 2", "top_p: "),
        ("--prompt a --max-tokens 0", "max_tokens: Max tokens must be from 1 to 10,000,000, not 0."),
        ("--prompt a --checkpoint 3", "checkpoint: The run run has no checkpoint 3; choose one of end, best"),
    ],
)
def test_mistakes_are_told_in_a_sentence(run: Path, arguments: str, sentence: str):
    assert sentence in refused("generate", run, *arguments.split())


def test_a_model_has_no_rewards_to_score_with(run: Path, models: Path):
    said = refused("generate", next(models.glob("**/config.json")).parent, "--prompt", "a", "--score")
    assert "has no reward functions for --score" in said


def test_a_conversation_with_every_command(run: Path):
    said = "Hi|/base|Hi|/both|/row 4|/seed 7|/system Be brief.|Hi|/reset|/help|/quit|lost|"
    result = call("chat", run, *GREEDY, keys=said.replace("|", "\n"))
    assert result.exit_code == 0
    # Both answer at first; then the base alone; then both again, to the row and to the last prompt.
    assert result.stdout.splitlines().count("base") >= 3 and result.stdout.count("tuned\n") == 3
    assert "base and tuned loaded" in result.stderr
    assert "row 4 of 8 of rows.jsonl, answer 6: What is 3 plus 3?" in result.stderr
    assert all(command in result.stderr for command in COMMANDS)


def test_a_wrong_command_does_not_end_the_conversation(run: Path):
    keys = f"/nope\n/seed x\n/row x\n/row 99\n/row 0\n/seed {'9' * 5000}\n/row {'9' * 5000}\nHi\n"
    result = call("chat", run, *GREEDY, keys=keys)
    assert result.exit_code == 0 and "tuned\n" in result.stdout
    for sentence, count in (("There is no command /nope", 1), ("whole number, as in /seed 7", 2), ("as in /row 3", 4)):
        assert result.stderr.count(sentence) == count


def test_turns_are_remembered_by_side_and_pictures_are_of_the_next_prompt(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[Any, Any]] = []
    answer, both = chat_session.answer, [picture(tmp_path / "a.png"), picture(tmp_path / "b.png", seed=1)]

    def spy(chat: Any, question: Any, *rest: Any) -> Any:
        turns = {side: [turn.images for turn in turns] for side, turns in question.turns.items()}
        asked.append((question.images, turns))
        return answer(chat, question, *rest)

    monkeypatch.setattr("backend.cli.chat.answer", spy)
    monkeypatch.chdir(tmp_path)
    call("chat", run, *GREEDY, keys="a\n/base\nb\n/both\nc\n/reset\nd\n")
    counts = [{side: len(turns) for side, turns in sides.items()} for _, sides in asked]
    assert counts == [{}, {"base": 1, "tuned": 1}, {"base": 2, "tuned": 1}, {}]
    asked.clear()
    keys = "/image b.png\nWhat?\nAnd now?\n/image none.png\nHere?\n"
    result = call("chat", tiny_vision_model(tmp_path / "model"), "--image", "a.png", *GREEDY, keys=keys)
    assert asked == [(both, {}), ([], {"base": [both]}), ([str(tmp_path / "none.png")], {"base": [both, []]})]
    assert result.stdout and "There is no picture" in result.stderr


def test_ctrl_c_stops_an_answer_and_keeps_what_there_is(run: Path, monkeypatch: pytest.MonkeyPatch):
    printed: list[str] = []

    def print_text(*text: object, **more: Any) -> None:
        printed.append(str(text))
        if len(printed) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat_session, "tell", print_text)
    result = call("chat", run, *GREEDY, keys="Hi\nHi again\n")
    assert result.exit_code == 0 and "stopped" in result.stderr and len(printed) > 4
