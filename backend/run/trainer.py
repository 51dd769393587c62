"""The loop: take problems, sample groups, score them, learn, write it down.

A run is a folder. Everything that happens goes into its diary; what a person could mend ends it with a sentence, what
they could not with a traceback, and either way the last finished step is saved first.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from backend import ranks
from backend.models.export import export, fuse_run
from backend.models.policy import save_model
from backend.run import checkpoint
from backend.run.checkpoint import TrainingState
from backend.run.checkpoint_writer import CheckpointWriter, snapshot
from backend.run.control import Control, Stopped
from backend.run.evaluate import held_out_rewards
from backend.run.parts import RunParts, load_parts
from backend.run.step_timer import StepTimer
from backend.run.telemetry import HealthReporter, PhaseReporter, group_row, versions
from backend.spec.config import Config
from backend.spec.config_notes import config_notes
from backend.spec.events import Diary, JsonLines, read_events, truncate_file
from backend.spec.faults import Mistake
from backend.spec.places import RunFolder, hold_lock
from backend.training.batch import completion_metrics, pack
from backend.types import Group, Problem


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended: the last kind of its diary, the step it reached, a sentence, and for a bug its traceback."""

    kind: str
    step: int
    sentence: str
    exit_code: int
    traceback: str = ""


def train(config: Config, run: RunFolder, *, command: str, echo: Callable[[Any], None] | None = None) -> Ending:
    """Train `config` in `run` from the start, or from its newest checkpoint where it has one. Never raises for what
    happens in the run: it is in the diary and in the Ending. Raises Mistake when another process holds the run."""
    lock = hold_lock(run)
    try:
        saved = checkpoint.newest(run)
        truncate_file(run.events, saved.state.events_bytes if saved else 0)
        truncate_file(run.completions, saved.state.completions_bytes if saved else 0)
        trainer = Trainer(config, run, Diary(run.events, echo))
        return trainer.end(trainer.ending(lambda: trainer.run(saved, command)))
    finally:
        os.close(lock)


class Trainer:
    """One run. `state` stands for the last finished step; nothing of a step counts until its diary line is written."""

    parts: RunParts

    def __init__(self, config: Config, run: RunFolder, diary: Diary) -> None:
        self.config = config
        self.folder = run
        self.diary = diary
        self.completions = JsonLines(run.completions)
        self.control = Control(run, diary)
        self.state = TrainingState()
        self.checkpoint_writer = CheckpointWriter(run, config.keep_checkpoints)
        self.saved_step: int | None = None
        self._save_s = 0.0
        self.timer = StepTimer(self.clock)
        self._logged: dict[str, float] = {}
        self.phases = PhaseReporter(diary)
        before = (event["metrics"] for event in read_events(run.events) if event.get("kind") == "step")
        self.health = HealthReporter(diary, before)
        self._rewards_since_save: list[float] = []

    # ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, saved: checkpoint.Checkpoint | None, command: str) -> Ending:
        self.control.listen_to_signals()
        self.diary.write("phase", phase="loading")
        maybe_set_recommended_wired_limit()  # on a Mac, memory in use is not paged out; elsewhere this says nothing
        parts = load_parts(self.config, self.note)
        if saved is not None:
            parts.restore(saved)
            self.state, self.saved_step = saved.state, saved.state.step
        self.parts = parts  # whole from here on: what fails later is saved first
        self.tell_start(saved, command)
        if self._evaluation_due(self.state.step) and self.state.evaluated < self.state.step:
            self.evaluate(self.state.step)  # how good the model is to begin with; or a stop broke this off
        for step in range(self.state.step + 1, self.parts.steps + 1):
            self.step(step)
            self.after_step(step)
        self.settle()
        if self.saved_step != self.state.step:
            self.save()
            self.settle()
        self.finish()
        return Ending("finished", self.state.step, f"Finished after {self.state.step} steps.", 0)

    def step(self, step: int) -> None:
        """One rollout and its updates. A stop before the updates leaves the last finished step standing."""
        self.timer = StepTimer(self.clock)
        groups, gathered = self.gather(step)
        reward_metrics = self.parts.scoring.compare(groups, step)
        self.settle()  # what is being written may not change yet
        with self.timer.phase("train"):
            learn_metrics = self.learn(groups)
        self._rewards_since_save.append(reward_metrics["reward"])
        told = gathered | reward_metrics | learn_metrics | self._logged | self.parts.scoring.observe(groups, step)
        self.write(step, groups, told)

    def gather(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """The step's scored groups, and how quickly they were sampled. With dynamic sampling, groups whose completions do
        not differ are put aside and more prompts drawn, up to a limit (DAPO, arXiv:2503.14476)."""
        wanted, config = self.config.prompts_per_step, self.config
        kept: list[Group] = []
        spare: list[Group] = []
        for _ in range(config.dynamic_sampling_rounds if config.dynamic_sampling else 1):
            cursor = self.parts.prompt_stream.cursor
            problems = self.parts.prompt_stream.take(wanted - len(kept))
            with self.timer.phase("rollout"):
                groups = self.sample(problems, cursor)
            with self.timer.phase("reward"):
                self.score(groups, step)
            telling = [not config.dynamic_sampling or self.parts.scoring.has_signal(group, step) for group in groups]
            kept += [group for group, tells in zip(groups, telling, strict=True) if tells]
            spare += [group for group, tells in zip(groups, telling, strict=True) if not tells]
            if len(kept) == wanted:
                break
        tokens = sum(len(one.tokens) for group in kept + spare for one in group.completions)
        told = {"rollout_tokens_per_second": self.timer.speed(tokens, "rollout")}
        if config.dynamic_sampling:
            told["dynamic_sampling/prompts"] = len(kept) + len(spare)
        return kept + spare[: wanted - len(kept)], told

    def sample(self, problems: list[Problem], place: int) -> list[Group]:
        room = len(problems) * self.config.group_size * self.config.max_completion_length

        def poll(drawn: int) -> None:
            self.phases.tell("sampling", drawn / room)
            if self.checkpoint_writer.has_ended:
                self.settle()
            self.control.obey(resting=self.rest)

        return self.parts.rollout.sample(
            problems, self.config.group_size, self.parts.sampling, self.config.seed, place, poll
        )

    def score(self, groups: list[Group], step: int) -> None:
        """Fill in scores and rewards."""
        self.phases.tell("scoring")
        self._logged = self.parts.scoring.score(groups, step, self.parts.prompt_stream.epoch)
        self.control.obey(resting=self.rest)

    def learn(self, groups: list[Group]) -> dict[str, float]:
        def poll() -> None:
            self.phases.tell("learning")
            self.control.obey(may_stop=False, resting=self.rest)

        # Sampling and learning want buffers of other sizes: what one of them leaves behind is of no use to the other.
        mx.clear_cache()
        masked = self.config.mask_truncated_completions
        batch = pack(groups, pad_id=self.parts.policy.pad_id, mask_truncated_completions=masked)
        metrics = self.parts.learner.learn(batch, poll)
        mx.clear_cache()
        return metrics

    def after_step(self, step: int) -> None:
        """Evaluate and save when due; see to words that had to wait for the step's end."""
        if self._evaluation_due(step):
            self.evaluate(step)
        if step % self.config.save_every == 0 or self.control.save_wanted:
            self.control.save_wanted = False
            self.save()
        for sentence in self.parts.background_tokenizer.said():
            self.note(sentence)
        self.control.obey(resting=self.rest)

    def tell_start(self, saved: checkpoint.Checkpoint | None, command: str) -> None:
        self.diary.write(
            "started", pid=os.getpid(), command=command, model=self.config.model, iterations=self.parts.steps,
            ranks=ranks.size(), device=str(mx.default_device()), versions=versions(),
            resumed_from=saved.state.step if saved else None,
        )  # fmt: skip
        if saved:  # its own line came after the place to which the diary is cut back
            self._tell_checkpoint(saved.state.step, saved.path)
        for sentence in self.parts.scoring.notes() + config_notes(self.config):
            self.note(sentence)

    # ── beside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _evaluation_due(self, step: int) -> bool:
        every = self.config.steps_per_eval
        return bool(self.parts.valid and every) and (step % every == 0 or step == self.parts.steps)

    def evaluate(self, step: int) -> None:
        metrics = self._held_out("valid", self.parts.valid, self.config.val_batches)
        self.state.score, self.state.evaluated = _mean([metrics["reward"]]), step

    def _held_out(self, split: str, problems: list[Problem], count: int) -> dict[str, float]:
        """Held-out rewards of the last finished step, told to the diary."""
        config, step, began = self.config, self.state.step, self.clock()
        stage = self.parts.scoring.stage(step)

        def poll(done: float) -> None:
            self.phases.tell("evaluating", done)
            self.control.obey(resting=self.rest)

        metrics = held_out_rewards(
            self.parts.rollout,
            problems,
            lambda groups: self.parts.scoring.score(groups, step, self.parts.prompt_stream.epoch),
            stage.names,
            stage.weights.at(step),
            sampling=self.parts.sampling,
            group_size=config.num_generations_eval or config.group_size,
            batch_size=config.prompts_per_step,
            count=count,
            poll=poll,
            beside=not self.parts.scoring.uses_mlx,
        )
        self.diary.write("eval", step=step, split=split, metrics=metrics | {"time/eval": self.clock() - began})
        return metrics

    def save(self) -> None:
        """Begin a checkpoint of the last finished step; it stands once it is settled."""
        if ranks.rank() != 0:
            return
        self.settle()
        began = self.clock()
        self.diary.write("phase", phase="saving")
        if not (self.parts.valid and self.config.steps_per_eval):
            self.state.score = _mean(self._rewards_since_save)
        self._rewards_since_save = []
        self.state.events_bytes, self.state.completions_bytes = self.diary.size, self.completions.size
        self.state.bonus, self.state.reward_weights = self.parts.learner.bonus.state(), self.parts.scoring.state()
        self.checkpoint_writer.begin(
            snapshot(self.state, self.parts.policy, self.parts.learner, self.config), (self.diary, self.completions)
        )
        self._save_s += self.clock() - began

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, and tell that it stands. Raises Mistake when the disk refused."""
        began = self.clock()
        if (saved := self.checkpoint_writer.wait()) is not None:
            self.saved_step = saved.step
            self._tell_checkpoint(saved.step, saved.path)
            self._save_s += self.clock() - began

    def rest(self) -> None:
        """Before a pause: let what is being written stand, and give memory back."""
        self.settle()
        mx.clear_cache()

    def finish(self) -> None:
        """What comes after the last step: the test split, the complete model, LM Studio."""
        config = self.config
        if self.parts.test:
            self._held_out("test", self.parts.test, config.test_batches)
        if config.train_type == "full":
            save_model(self.parts.policy, config.model, self.folder.model)
        fuses = config.fuse and config.train_type != "full"
        if not (fuses or config.lm_studio_name):
            return
        self.diary.write("phase", phase="exporting")
        self._let_go()
        if fuses:
            fuse_run(self.folder)
        if config.lm_studio_name:
            self._export(config.lm_studio_name)

    def _let_go(self) -> None:
        """Fusing loads the model again; two of them need not fit."""
        self.parts.background_tokenizer.end()
        del self.parts
        mx.clear_cache()

    def _export(self, name: str) -> None:
        """Into LM Studio. What stands in the way there takes nothing from a run that has trained well."""
        try:
            made = export(self.folder, "lmstudio", name)
        except Mistake as mistake:
            sentence = " ".join(fault.sentence for fault in mistake.faults)
            self.diary.write("note", level="warning", sentence=f"The model was not put into LM Studio. {sentence}")
        else:
            self.note(f"The model is in LM Studio as {name} ({made.path}).")

    # ── the diary ────────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, step: int, groups: list[Group], told: dict[str, float]) -> None:
        """The step's completions and its line. After this the step is done."""
        made = completion_metrics(groups)
        for group in groups:
            self.completions.append(group_row(step, group))
        self.state = replace(
            self.state, step=step, updates=self.parts.learner.updates, cursor=self.parts.prompt_stream.cursor,
            num_tokens=self.state.num_tokens + int(made["num_tokens"]),
            elapsed_s=self.state.elapsed_s + self.timer.elapsed(),
        )  # fmt: skip
        trained = made["num_tokens"] * self.config.num_iterations
        saved = {"time/save": self._save_s} if self._save_s else {}
        self._save_s = 0.0
        line = self.diary.write("step", step=step, metrics=made | told | saved | {
            "num_tokens": self.state.num_tokens, "epoch": self.parts.prompt_stream.epoch,
            "train_tokens_per_second": self.timer.speed(trained, "train"),
        } | self.timer.metrics())  # fmt: skip
        self.health.look(line["metrics"])

    def _tell_checkpoint(self, step: int, path: Path) -> None:
        self.diary.write("checkpoint", step=step, path=str(path.relative_to(self.folder.path)))

    def note(self, sentence: str) -> None:
        self.diary.write("note", level="info", sentence=sentence)

    def ending(self, work: Callable[[], Ending]) -> Ending:
        """What `work` comes to, whatever it raises: asked to stop, something a person can mend, or a bug."""
        try:
            return work()
        except Stopped as stop:
            step = self.state.step
            return Ending("stopped", step, f"Stopped at step {step} because {stop}; everything is saved.", 3)
        except Mistake as mistake:
            return Ending("failed", self.state.step, str(mistake), 2)
        except Exception as error:
            traceback.print_exc()
            sentence = f"{type(error).__name__}: {error}"
            return Ending("failed", self.state.step, sentence, 1, traceback.format_exc())

    def end(self, ending: Ending) -> Ending:
        """Save what is not saved yet, write the last line, and close the diary."""
        if ending.kind != "finished":
            ending = self._left(ending)
        carries: dict[str, Any] = {"step": ending.step, "reason": ending.kind, "sentence": ending.sentence}
        if ending.traceback:
            carries["traceback"] = ending.traceback
        self.diary.write(ending.kind, **carries)
        self.checkpoint_writer.close()
        if "parts" in vars(self):
            self.parts.background_tokenizer.end()
        for lines in (self.diary, self.completions):
            lines.close()
        return ending

    def _left(self, ending: Ending) -> Ending:
        """`ending`, once the last finished step is saved; where that fails too, a failure that says both."""

        def leave() -> Ending:
            with contextlib.suppress(Mistake):  # what could not be written is tried once more
                self.settle()
            if self.saved_step != self.state.step and self.between_steps:
                self.save()
                self.settle()
            if ending.kind == "stopped" and self.config.train_type == "full":
                save_model(self.parts.policy, self.config.model, self.folder.model)
            return ending

        after = self.ending(leave)
        if ending.kind == "stopped" or after.sentence == ending.sentence:
            return after
        return after if after is ending else replace(after, sentence=f"{ending.sentence} {after.sentence}")

    @property
    def between_steps(self) -> bool:
        """Whether the weights are those of the last finished step: loaded, and not half-way through the next updates."""
        return "parts" in vars(self) and self.parts.learner.updates == self.state.updates

    def clock(self) -> float:
        """Seconds, on a clock that stands still in a pause."""
        return time.monotonic() - self.control.paused_s


def _mean(rewards: list[float]) -> float | None:
    """Their mean; None where no function had an opinion."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    return sum(known) / len(known) if known else None
