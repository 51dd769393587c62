"""Run by a Python that has TRL, which ours has not: TRL's own parser on files of ours, and its own advantages and loss
of a given batch.

A line of JSON on stdin is a call, a line on stdout its result:

    ["arguments"]                        every argument of `trl grpo`
    ["parse", FILE]                      [words of the file that it does not know, why it refuses the file or ""]
    ["batch", FOLDER, CASE]              what TRL makes of the completions of CASE with the settings of an exported FOLDER

CASE: `completions`, token ids of B = prompts x group; `noise`, [B][T] added to the old log-probabilities and, halved,
to the reference's.
"""

import contextlib
import io
import json
import os
import sys
import warnings

import torch
import transformers
from datasets import Dataset
from trl import GRPOTrainer
from trl.scripts.grpo import make_parser

warnings.simplefilter("ignore")
IN_TRL_ONLY = ["--use_cpu", "true", "--use_vllm", "false", "--report_to", "none", "--log_completions", "false"]
"""What this machine, without CUDA, asks for."""


def arguments():
    return sorted({action.dest for action in make_parser()._actions} - {"help"})


def parse(file):
    try:
        *_, unknown = make_parser().parse_args_and_config(
            ["--config", file, "--use_cpu", "true"], return_remaining_strings=True
        )
        return [unknown, ""]
    except (Exception, SystemExit) as error:
        return [[], f"{type(error).__name__}: {error}"]


def batch(folder, case):
    os.chdir(folder)
    sys.path.insert(0, folder)
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("backend", "rewards", "reward_calls", "dataset")
    ]:
        del sys.modules[name]
    import dataset
    import rewards

    dataset.prepare()
    rows = [json.loads(line) for line in dataset.TRAIN.open()]
    _, training, model, _ = make_parser().parse_args_and_config(["--config", "grpo_config.yaml", *IN_TRL_ONLY])
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.model_name_or_path, padding_side="left")
    trainer = GRPOTrainer(
        model=model.model_name_or_path, args=training, reward_funcs=list(rewards.FUNCTIONS), train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )  # fmt: skip
    group = training.num_generations
    inputs = [row for row in rows[: len(case["completions"]) // group] for _ in range(group)]
    chats = [row["prompt"] for row in inputs]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]
    texts = [
        [{"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}]
        for ids in case["completions"]
    ]
    trainer._generate = lambda _: (prompts, case["completions"], None, texts, None, {}, None, None)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = training.gradient_accumulation_steps
    made = trainer._generate_and_score_completions(inputs)
    ids = torch.cat([made["prompt_ids"], made["completion_ids"]], dim=1)
    seen = torch.cat([made["prompt_mask"], made["completion_mask"]], dim=1)
    width = made["completion_ids"].shape[1]
    logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, seen, width, compute_entropy=True
    )
    noise = torch.tensor([[*row, *[0.0] * width][:width] for row in case["noise"]])
    made["old_per_token_logps"] = logps.detach() + noise
    if "ref_per_token_logps" in made:
        made["ref_per_token_logps"] = made["ref_per_token_logps"] + noise / 2
    loss = trainer._compute_loss(trainer.model, made)
    arrays = {"logps": logps, "entropies": entropies, "old": made["old_per_token_logps"], "ref": made.get("ref_per_token_logps"),
              "mask": made["completion_mask"], "advantages": made["advantages"]}  # fmt: skip
    return {"loss": loss.item()} | {name: None if array is None else array.tolist() for name, array in arrays.items()}


if __name__ == "__main__":
    for line in sys.stdin:
        name, *given = json.loads(line)
        with contextlib.redirect_stdout(io.StringIO()):
            result = {"arguments": arguments, "parse": parse, "batch": batch}[name](*given)
        print(json.dumps(result), flush=True)
