"""The loop: take problems, sample groups, score them, learn, write it down.

A run is a folder. Everything that happens goes into its diary; what a person could mend ends it with a sentence, what
they could not with a traceback, and either way the last finished step is saved first.
"""

from __future__ import annotations

import os
import platform
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend import checkpoint, ranks
from backend.batch import advantages, completion_metrics, pack
from backend.checkpoint import State
from backend.control import Control, Stopped
from backend.data import Deck, Prepared, Splits, prepare, read_splits
from backend.evaluate import held_out_rewards
from backend.export import export, fuse_run
from backend.learner import Learner
from backend.nouns import Group, Problem
from backend.policy import Policy, load_policy, save_adapters, save_model
from backend.rewards.resolve import RewardFunction, resolve
from backend.rewards.score import score
from backend.rollout import Rollout
from backend.sampler import Sampling
from backend.spec.catalog import locate_reward_file
from backend.spec.config import Config
from backend.spec.events import Diary, JsonLines, cut_back
from backend.spec.faults import Mistake
from backend.spec.places import RunFolder, hold_lock

PHASE_EVERY_S = 0.5
"""Phases of a step are told to the diary at most this often."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended: the last kind of its diary, the step it reached, and a sentence."""

    kind: str
    step: int
    sentence: str
    exit_code: int


def train(config: Config, run: RunFolder, *, command: str, echo: Callable[[Any], None] | None = None) -> Ending:
    """Train `config` in `run` from the start, or from its newest checkpoint where it has one. Never raises for what
    happens in the run: it is in the diary and in the Ending. Raises Mistake when another process holds the run."""
    lock = hold_lock(run)
    saved = checkpoint.newest(run)
    cut_back(run.events, saved.state.events_bytes if saved else 0)
    cut_back(run.completions, saved.state.completions_bytes if saved else 0)
    diary = Diary(run.events, echo)
    trainer = Trainer(config, run, diary)
    try:
        ending = trainer.run(saved, command)
    except Stopped as stop:
        ending = Ending(
            "stopped",
            trainer.state.step,
            f"Stopped at step {trainer.state.step} because {stop}; everything is saved.",
            3,
        )
    except Mistake as mistake:
        ending = Ending("failed", trainer.state.step, str(mistake), 2)
    except Exception as error:
        traceback.print_exc()
        ending = Ending("failed", trainer.state.step, f"{type(error).__name__}: {error}", 1)
    return trainer.end(ending, lock)


class Trainer:
    """One run. `state` stands for the last finished step; nothing of a step counts until its diary line is written."""

    policy: Policy
    learner: Learner
    rollout: Rollout
    deck: Deck
    functions: list[RewardFunction]

    def __init__(self, config: Config, run: RunFolder, diary: Diary) -> None:
        self.config = config
        self.folder = run
        self.diary = diary
        self.completions = JsonLines(run.completions)
        self.control = Control(run, diary)
        self.state = State()
        self.saved_step: int | None = None
        self._phase_told = 0.0
        self._rewards_since_save: list[float] = []

    # ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, saved: checkpoint.Checkpoint | None, command: str) -> Ending:
        self.control.listen_to_signals()
        self.diary.write("phase", phase="loading")
        self.load(saved)
        self.tell_start(saved, command)
        for step in range(self.state.step + 1, self.steps + 1):
            self.step(step)
            self.after_step(step)
        if self.saved_step != self.state.step:
            self.save()
        self.finish()
        return Ending("finished", self.state.step, f"Finished after {self.state.step} steps.", 0)

    def step(self, step: int) -> None:
        """One rollout and its updates. A stop before the updates leaves the last finished step standing."""
        cursor, began, paused = self.deck.cursor, time.monotonic(), self.control.paused_s
        mx.reset_peak_memory()
        problems = self.deck.take(self.config.prompts_per_step)
        try:
            groups, rollout_s = self._timed(lambda: self.sample(problems, cursor))
            reward_metrics, reward_s = self._timed(lambda: self.score(groups))
        except BaseException:
            self.deck.cursor = cursor
            raise
        learn_metrics, train_s = self._timed(lambda: self.learn(groups))
        made = completion_metrics(groups)
        trained = made["num_tokens"] * self.config.num_iterations
        self.state = replace(
            self.state, step=step, updates=self.learner.updates, cursor=self.deck.cursor,
            num_tokens=self.state.num_tokens + int(made["num_tokens"]),
            elapsed_s=self.state.elapsed_s + time.monotonic() - began - (self.control.paused_s - paused),
        )  # fmt: skip
        sampled = made["completions/mean_length"] * sum(len(group.completions) for group in groups)
        self.write(step, groups, made | reward_metrics | learn_metrics | {
            "num_tokens": self.state.num_tokens, "epoch": self.deck.epoch,
            "rollout_tokens_per_second": sampled / rollout_s, "train_tokens_per_second": trained / train_s,
            "time/rollout": rollout_s, "time/reward": reward_s, "time/train": train_s,
            "time/step": time.monotonic() - began - (self.control.paused_s - paused),
            "peak_memory_gb": mx.get_peak_memory() / 1e9,
        })  # fmt: skip

    def sample(self, problems: list[Problem], place: int) -> list[Group]:
        room = len(problems) * self.config.group_size * self.config.max_completion_length

        def poll(drawn: int) -> None:
            self.tell_phase("sampling", drawn / room)
            self.control.obey(resting=mx.clear_cache)

        return self.rollout.sample(problems, self.config.group_size, self.sampling, self.config.seed, place, poll)

    def score(self, groups: list[Group]) -> dict[str, float]:
        """Fill in scores, rewards and advantages."""
        self.tell_phase("scoring")
        score(groups, self.functions, self.config.weights, self.config.reward_timeout)
        completions = [one for group in groups for one in group.completions]
        advantage_B, metrics = advantages(
            [[one.scores[name] for name in self.names] for one in completions],
            self.config.group_size,
            weights=self.config.weights,
            scale_rewards=self.config.scale_rewards,
            names=self.names,
        )
        for one, advantage in zip(completions, advantage_B.tolist(), strict=True):  # pyright: ignore
            one.advantage = advantage
        self._rewards_since_save.append(metrics["reward"])
        self.control.obey(resting=mx.clear_cache)
        return metrics

    def learn(self, groups: list[Group]) -> dict[str, float]:
        def poll() -> None:
            self.tell_phase("learning")
            self.control.obey(may_stop=False, resting=mx.clear_cache)

        mx.clear_cache()
        return self.learner.learn(pack(groups, pad_id=self.policy.pad_id), poll)

    def after_step(self, step: int) -> None:
        """Evaluate and save when due; see to words that had to wait for the step's end."""
        config = self.config
        if self.valid and config.steps_per_eval and (step % config.steps_per_eval == 0 or step == self.steps):
            self.evaluate(step)
        if step % config.save_every == 0 or self.control.save_wanted:
            self.control.save_wanted = False
            self.save()
        self.control.obey(resting=mx.clear_cache)

    # ── before ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def load(self, saved: checkpoint.Checkpoint | None) -> None:
        config = self.config
        splits = read_splits(config)
        self.functions = resolve(config.reward_functions, reward_file(config))
        self.names = [function.name for function in self.functions]
        self.policy = load_policy(config, self.note)
        train = self._prepared(splits, "train")
        self.deck = Deck(train, config.seed)
        self.valid = self._prepared(splits, "valid") if splits.valid and config.steps_per_eval else []
        self.test = self._prepared(splits, "test") if splits.test and config.test else []
        if config.test and not self.test:
            raise Mistake("test", f"Evaluate test split is on, and {config.data} has no split {config.test_split}.")
        each = config.prompts_per_step
        self.steps = -(-config.epochs * len(train) // each) if config.epochs else config.iters
        self.learner = Learner(self.policy, config, self.steps)
        self.sampling = Sampling(config.temperature, config.top_p, config.top_k, config.min_p)
        self.rollout = Rollout(self.policy, config.max_completion_length, stop=config.stop)
        if saved is not None:
            self._restore(saved)

    def _prepared(self, splits: Splits, split: str) -> list[Problem]:
        source = splits.source.get(split, self.config.data)
        prepared = prepare(getattr(splits, split), self.policy.tokenizer, self.config, source)
        self._tell_left_out(prepared, split)
        return prepared.problems

    def _tell_left_out(self, prepared: Prepared, split: str) -> None:
        room = self.config.max_seq_length - self.config.max_completion_length
        if not prepared.problems:
            raise Mistake("max_seq_length", f"Every prompt of the {split} split is longer than the {room} tokens that Max Seq "
                          f"leaves beside the completion; raise Max Seq or lower Completion.")  # fmt: skip
        if prepared.too_long:
            self.note(f"{prepared.too_long} of {prepared.too_long + len(prepared.problems)} rows of the {split} split are "
                      f"left out: their prompts (up to {prepared.longest} tokens) leave no room for a completion.")  # fmt: skip

    def _restore(self, saved: checkpoint.Checkpoint) -> None:
        self.policy.assign(saved.weights())
        self.state = saved.state
        self.saved_step = self.state.step
        self.learner.restore(saved.optimizer(), self.state.updates)
        self.deck.cursor = self.state.cursor

    def tell_start(self, saved: checkpoint.Checkpoint | None, command: str) -> None:
        self.diary.write(
            "started", pid=os.getpid(), command=command, model=self.config.model, iterations=self.steps,
            ranks=ranks.size(), device=str(mx.default_device()), versions=versions(),
            resumed_from=saved.state.step if saved else None,
        )  # fmt: skip
        for function in self.functions:
            if function.note:
                self.note(function.note)

    # ── beside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def evaluate(self, step: int) -> None:
        metrics = self._held_out(self.valid, self.config.val_batches)
        self.state.score = metrics["reward"]
        self.diary.write("eval", step=step, split="valid", metrics=metrics)

    def _held_out(self, problems: list[Problem], count: int) -> dict[str, float]:
        config = self.config

        def poll(done: float) -> None:
            self.tell_phase("evaluating", done)
            self.control.obey(resting=mx.clear_cache)

        return held_out_rewards(
            self.rollout,
            problems,
            lambda groups: score(groups, self.functions, config.weights, config.reward_timeout),
            self.names,
            config.weights,
            sampling=self.sampling,
            group_size=config.num_generations_eval or config.group_size,
            batch_size=config.prompts_per_step,
            count=count,
            poll=poll,
        )

    def save(self) -> None:
        """A checkpoint of the last finished step, and the adapters beside it as mlx-lm loads them."""
        if ranks.rank() != 0:
            return
        self.diary.write("phase", phase="saving")
        if not (self.valid and self.config.steps_per_eval):
            recent = self._rewards_since_save
            self.state.score = sum(recent) / len(recent) if recent else self.state.score
        self._rewards_since_save = []
        for lines in (self.diary, self.completions):
            lines.sync()
        self.state.events_bytes, self.state.completions_bytes = self.diary.size, self.completions.size
        full = self.config.train_type == "full"
        path = checkpoint.save(
            self.folder, self.state, self.policy.trainable(), self.learner.state_arrays(),
            whole_model=full, keep=self.config.keep_checkpoints,
        )  # fmt: skip
        if not full:
            save_adapters(self.policy, self.config, self.folder.adapters)
        self.saved_step = self.state.step
        self.diary.write("checkpoint", step=self.state.step, path=str(path.relative_to(self.folder.path)))

    def finish(self) -> None:
        """What comes after the last step: the test split, the complete model, LM Studio."""
        config = self.config
        if self.test:
            self.diary.write(
                "eval", step=self.state.step, split="test", metrics=self._held_out(self.test, config.test_batches)
            )
        if config.train_type == "full":
            save_model(self.policy, config.model, self.folder.model)
        elif config.fuse:
            self.diary.write("phase", phase="exporting")
            fuse_run(self.folder)
        if config.lm_studio_name:
            self.diary.write("phase", phase="exporting")
            made = export(self.folder, "lmstudio", config.lm_studio_name)
            self.note(f"The model is in LM Studio as {config.lm_studio_name} ({made.path}).")

    # ── the diary ────────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, step: int, groups: list[Group], metrics: dict[str, float]) -> None:
        """The step's completions and its line. After this the step is done."""
        for group in groups:
            self.completions.append(group_line(step, group))
        self.diary.write("step", step=step, metrics=metrics)

    def tell_phase(self, phase: str, progress: float | None = None) -> None:
        now = time.monotonic()
        if now - self._phase_told >= PHASE_EVERY_S:
            self._phase_told = now
            told = {} if progress is None else {"progress": round(progress, 3)}
            self.diary.write("phase", phase=phase, **told)

    def note(self, sentence: str) -> None:
        self.diary.write("note", level="info", sentence=sentence)

    def end(self, ending: Ending, lock: int) -> Ending:
        """Save what is not saved yet, write the last line, and let go of the run."""
        if ending.kind != "finished" and self.saved_step != self.state.step and self.state.step > 0:
            ending = self._saved(ending)
        if ending.kind == "stopped" and self.config.train_type == "full":
            save_model(self.policy, self.config.model, self.folder.model)
        carries: dict[str, Any] = {"step": ending.step, "reason": ending.kind, "sentence": ending.sentence}
        if ending.exit_code == 1:
            carries["traceback"] = traceback.format_exc()
        self.diary.write(ending.kind, **carries)
        for lines in (self.diary, self.completions):
            lines.close()
        os.close(lock)
        return ending

    def _saved(self, ending: Ending) -> Ending:
        try:
            self.save()
        except Mistake as mistake:
            return Ending("failed", ending.step, f"{ending.sentence} {mistake}", 2)
        return ending

    @staticmethod
    def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
        began = time.monotonic()
        return work(), max(time.monotonic() - began, 1e-9)


def group_line(step: int, group: Group) -> dict[str, Any]:
    """One line of completions.jsonl."""
    return {
        "step": step,
        "prompt": group.problem.prompt,
        "answer": group.problem.answer,
        "type": group.problem.type,
        "completions": [
            {"text": one.text, "tokens": len(one.tokens), "stop": one.stop, "rewards": one.scores,
             "reward": one.reward, "advantage": one.advantage}
            for one in group.completions
        ],
    }  # fmt: skip


def reward_file(config: Config) -> Path | None:
    return locate_reward_file(config.reward_functions_file) if config.reward_functions_file else None


def versions() -> dict[str, str]:
    names = ("grpo-studio", "mlx", "mlx-lm", "transformers")
    return {"python": platform.python_version(), "platform": platform.platform()} | {
        name: version(name) for name in names
    }
