"""The model card: settings for the Hub, text with and without an evaluation, and what never gets into it."""

import json
import shlex
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from backend.export import model_card as card_facts
from backend.export.exports import FORMATS
from backend.export.model_card import CardFacts, model_card, read_facts
from backend.export.privacy import clean_json_files, refuse_leaks
from backend.export.publishing import draw_curves
from backend.runs.events import read_events
from backend.runs.run_folder import RunFolder
from backend.trainer.evaluation.evaluation_rows import write_evaluation
from backend.utils.errors import UserError
from tests.support import made_up_evaluations, made_up_runs, small_run
from tests.support.vision_models import tiny_vision_model


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with telling names; the Hub is not asked."""
    home = tmp_path / "home" / "annabelle"
    home.mkdir(parents=True)
    for name in ("USER", "LOGNAME"):
        monkeypatch.setenv(name, "annabelle")
    for name in ("HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setattr(socket, "gethostname", lambda: "annabelles-laptop.local")
    monkeypatch.setattr(card_facts, "HfApi", lambda: pytest.fail("the Hub was asked"))
    return home


@pytest.fixture
def run(home: Path) -> RunFolder:
    base = home / "models" / "Qwen-tiny"
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: tiny\nlicense_link: LICENSE\n---\n# Tiny\n")
    settings = {"model": str(base), "data": str(home / "data" / "sums.jsonl"), "train_type": "lora"}
    settings |= {"reward_functions": ["r1_accuracy_reward_func", f"{home}/rewards.py:shorter"]}
    settings |= {"grpo_loss_type": "dapo", "system_prompt": f"Files are in {home}/data or /usr/share."}
    settings |= {"mcp_servers": {"files": {"command": "npx", "args": ["--token=a-key"], "env": {"KEY": "a-key"}}}}
    return made_up_runs.make_run(home / "runs" / "sums", **settings)


def facts(run: RunFolder, format_: str = "fused", checkpoint: str = "") -> CardFacts:
    return read_facts(run, "someone/sums", FORMATS[format_], checkpoint)


def settings_of(card: str) -> dict[str, object]:
    return ModelCard(card).data.to_dict()


def test_a_base_on_the_hub_is_named_with_its_relation_and_licence(run: RunFolder, monkeypatch: pytest.MonkeyPatch):
    made_up_runs.make_run(run.path, model="mlx-community/Qwen-tiny-4bit", data="openai/gsm8k", train_type="lora")
    monkeypatch.setattr(card_facts, "base_licence", lambda model, id_: {"license": "apache-2.0"})
    adapter, fused = (settings_of(model_card(facts(run, key))) for key in ("adapter", "4bit"))
    shared = {"library_name": "mlx", "pipeline_tag": "text-generation", "license": "apache-2.0"}
    shared |= {"base_model": "mlx-community/Qwen-tiny-4bit"}
    assert shared.items() <= adapter.items() and shared.items() <= fused.items()
    assert (adapter["base_model_relation"], fused["base_model_relation"]) == ("adapter", "finetune")
    assert {"mlx", "grpo", "lora"} <= set(adapter["tags"])  # type: ignore[call-overload]
    assert "--adapter-path adapter" in model_card(facts(run, "adapter")), "how to load it beside its base"
    assert 'load("someone/sums")' in model_card(facts(run))


@pytest.mark.parametrize(
    ("format_", "library", "line"),
    [
        ("original", "transformers", 'Model.from_pretrained("someone/sums")'),
        ("peft", "peft", "from peft import AutoPeftModelForCausalLM"),
    ],
)
def test_how_to_load_the_weights(run: RunFolder, format_: str, library: str, line: str, monkeypatch):
    monkeypatch.setattr(card_facts, "base_licence", lambda model, id_: {})
    card = model_card(read_facts(run, "someone/sums", FORMATS[format_], "", original="Qwen/Qwen-tiny"))
    about = settings_of(card)
    assert (about["library_name"], about["base_model"]) == (library, "Qwen/Qwen-tiny")
    assert line in card and "mlx_lm" not in card and "mlx" not in about["tags"]  # type: ignore[operator]


def test_settings_are_those_of_the_weights_and_changes_are_told(run: RunFolder, home: Path):
    change = {"step": 15, "settings": {"learning_rate": [1e-5, 5e-6], "beta": [0.05, 0.0]}}
    later = {"step": 40, "settings": {"temperature": [0.8, 0.7]}}
    run.changes.write_text(json.dumps({"v": 1, "changes": [change, later]}))
    lines = run.events.read_text().splitlines(keepends=True)
    events = [json.dumps({"v": 1, "seq": 0, "t": 1.0, "kind": "change", **each}) + "\n" for each in (change, later)]
    run.events.write_text("".join([*lines[:30], *events, *lines[30:]]))
    saved = run.checkpoints / "000020"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text('{"step": 20, "updates": 20, "cursor": 20}')
    for name in ("adapters.safetensors", "optimizer.safetensors"):
        (saved / name).touch()
    at_20, at_end = facts(run, checkpoint="20"), facts(run)
    assert (at_20.config.beta, at_20.config.temperature, at_end.config.temperature) == (0.0, 0.8, 0.7)
    assert "beta: 0.0" in at_20.settings and "temperature: 0.7" in at_end.settings
    card = model_card(at_20)
    assert "- From step 15 on: Learning Rate 1e-05 → 5e-06" in card and "Temp 0.8" not in card
    assert "- From step 40 on: Temp 0.8 → 0.7." in model_card(at_end)


def test_each_stage_that_trained_the_weights_has_its_own_reward_weights(run: RunFolder, monkeypatch):
    monkeypatch.setattr(card_facts, "base_licence", lambda model, id_: {})
    stages = [
        {"iters": 20, "reward_functions": ["r1_count_xml"], "reward_weights": [0.25]},
        {"iters": 20, "reward_weights": [3.0, 0.75]},
        {"iters": 100},
    ]
    settings = {"reward_functions": ["r1_accuracy_reward_func", "r1_count_xml"], "reward_weights": [7.0, 5.0]}
    made_up_runs.make_run(run.path, **settings, stages=stages)
    lines = [line for line in run.events.read_text().splitlines(keepends=True) if '"finished"' not in line]
    run.events.write_text("".join(line for line in lines if (json.loads(line).get("step") or 0) <= 30))
    rewards = {title: [row[:2] for row in rows] for title, rows in facts(run).rewards.items()}
    assert rewards == {
        "Stage 1, steps 1 to 20": [("r1_count_xml", 0.25), ("", 1.0)],
        "Stage 2, steps 21 to 30": [("r1_accuracy_reward_func", 3.0), ("r1_count_xml", 0.75), ("", 1.0)],
    }
    card = model_card(facts(run))
    assert "**Stage 2, steps 21 to 30**" in card and "| 3 |" in card and "| 7 |" not in card


def test_an_evaluation_of_these_weights_is_shown_and_one_of_others_is_not(run: RunFolder):
    events = [event for event in read_events(run.events) if event["kind"] == "eval"]
    ends = [f"{event['metrics']['reward']:.3g} at step {event['step']}" for event in (events[0], events[-1])]
    in_training = f"On held-out prompts, the reward was {' and '.join(ends)}."
    assert in_training in model_card(facts(run))
    rows = [made_up_evaluations.evaluated_row(index, 0.0, float(index < 6)) for index in range(8)]
    made = made_up_evaluations.evaluation(rows)
    write_evaluation(run.evaluations, made, rows)
    assert in_training in model_card(facts(run)), "it is of step 32, and the run ended at 60"
    step_60 = made.model_copy(update={"name": "end", "subject": made.subject.model_copy(update={"step": 60})})
    write_evaluation(run.evaluations, step_60, rows)
    card = model_card(facts(run))
    assert "went from 0 to 0.75" in card and "| **Reward** | 0" in card and "95 % intervals" in card
    assert "```text\nIs it 0?\n```" in card and "Before training, reward 0:\n\n```text\nbase 0\n```" in card


def test_a_run_without_rewards_claims_neither_them_nor_grpo(home: Path) -> None:
    raw = small_run.settings_for(home, train_mode="sft", reward_functions=[], reward_weights=[])
    rows = [{"prompt": "What is 2?", "completion": "2"}] * 4
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = model_card(facts(small_run.trained(raw, RunFolder(home / "runs" / "sft"))))
    text = ModelCard(card).text.replace("GRPO Studio", "")
    assert "GRPO" not in text and "reward" not in text.lower() and "fine-tuned with SFT on" in text
    assert "| Steps × rows | 3 × 1 |" in text and "![Training curves by step](curves.png)" in text
    assert {"sft", "lora"} <= set(settings_of(card)["tags"])  # type: ignore[call-overload]


@pytest.mark.parametrize("curve", [[(1, 2.0), (2, 2.0)], [(3, 1.0), (3, -1e300)]], ids=["level", "one step twice"])
def test_a_curve_without_height_or_width_is_drawn(curve: list[tuple[int, float]], tmp_path: Path) -> None:
    draw_curves({"reward": curve}, {"reward": "Reward"}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size


def test_a_vision_model_is_loaded_as_one(run: RunFolder, home: Path) -> None:
    made_up_runs.make_run(run.path, model=str(tiny_vision_model(home / "models" / "sees")))
    mlx, original, peft = (facts(run, key) for key in ("full", "original", "peft"))
    assert settings_of(model_card(mlx))["pipeline_tag"] == "image-text-to-text"
    assert "mlx_vlm.generate --model someone/sums --image" in model_card(mlx) and "mlx_lm" not in model_card(mlx)
    for found in (original, peft):
        assert "AutoModelForImageTextToText" in model_card(found) and "CausalLM" not in model_card(found)


def test_text_of_others_stays_text_in_the_card(run: RunFolder):
    """No link, HTML, command or setting of the card comes from a name in a run, a base model or a dataset."""
    base = "x`<script>y; $(touch z)` [a](b)\n---\nlicense: mit"
    licence = {"license": "other", "license_name": "x\n---\nlicense: mit\n---\n<b>", "license_link": "a\n---\n"}
    evil = "<img src=x> ![p](http://q) [l](http://m) `c`\n---\n# Heading | cell"
    rewards = {evil: [(evil, *row[1:]) for row in facts(run).rewards[""]]}
    samples = [(evil + "\n```\n# x", [("After", "```\n# y", 1.0)])]
    found = replace(facts(run), base=base, dataset=evil, licence=licence, versions={"mlx": evil}, device=evil)
    found = replace(found, format=FORMATS["adapter"], rewards=rewards, samples=samples)
    card = model_card(found)
    assert licence.items() >= {key: settings_of(card)[key] for key in ("license", "license_name")}.items()
    assert "base_model" not in settings_of(card)
    html = MarkdownIt("commonmark").enable("table").render(ModelCard(card).text)
    for never in ("<script>", "<img src=x", 'http://q"', 'http://m"', "<h1>Heading", "<h1>x", "<h1>y"):
        assert never not in html, html
    (command,) = [line for line in card.splitlines() if line.startswith("mlx_lm.generate")]
    assert shlex.split(command)[2].startswith("x`<script>y; $(touch z)`")


def test_without_an_evaluation_the_best_and_a_typical_completion_are_shown(run: RunFolder):
    rewards = [0.1, 0.5, 2.0]
    completions = [
        {"text": f"got ```{reward}", "tokens": 3, "stop": "eos", "rewards": {}, "reward": reward} for reward in rewards
    ]
    group = {"step": 60, "prompt": "2+2=", "answer": "4", "type": None, "completions": completions}
    with run.completions.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(group) + "\n")
    card = model_card(facts(run))
    assert "Best of its group, reward 2:\n\n````text\ngot ```2.0\n````" in card
    assert "Typical of its group, reward 0.5" in card


def test_no_path_user_or_host_of_this_machine_is_in_card_or_settings(run: RunFolder, home: Path):
    found = facts(run)
    settings = yaml.safe_load(found.settings)
    assert (settings["model"], settings["data"]) == ("Qwen-tiny", "sums.jsonl")
    assert settings["reward_functions"][1] == "rewards.py:shorter"
    assert settings["system_prompt"] == "Files are in ~/data or /usr/share."
    for text in (model_card(found), found.settings):
        for secret in (str(home), "annabelle", "/home/", str(home.parent), "a-key"):
            assert secret not in text, f"{secret} is in it"


def test_json_files_are_cleaned_and_what_is_left_is_found(tmp_path: Path, home: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"model": str(home / "base"), "num_layers": 4}))
    clean_json_files(folder, "a/base")
    assert json.loads((folder / "adapter_config.json").read_text()) == {"model": "a/base", "num_layers": 4}
    refuse_leaks(folder, "hf_secret")
    for text, what in (
        (f"see {home}/notes", "a path of this machine"),
        ("see /Users/annabelle", "the path of a user's home"),
        ("made on annabelles-laptop", "the name of this machine"),
        ("with hf_secret", "an access token"),
        (f"with hf_{'a' * 34}", "an access token"),
    ):
        (folder / "README.md").write_text(text)
        with pytest.raises(UserError, match=f"README.md contains {what}"):
            refuse_leaks(folder, "hf_secret")
