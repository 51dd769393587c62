"""The loop: take problems, sample groups, score them, learn, write it down.

A run is a folder. Everything that happens goes into its diary; what a person could mend ends it with a sentence, what
they could not with a traceback, and either way the last finished step is saved first.
"""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from backend import checkpoint, ranks
from backend.batch import completion_metrics, pack
from backend.checkpoint import State
from backend.control import Control, Stopped
from backend.evaluate import held_out_rewards
from backend.export import export, fuse_run
from backend.kit import Kit, load_kit
from backend.nouns import Group, Problem
from backend.policy import save_adapters, save_model
from backend.record import Health, Phases, group_line, versions
from backend.spec.checks import remarks
from backend.spec.config import Config
from backend.spec.events import Diary, JsonLines, cut_back, read_events
from backend.spec.faults import Mistake
from backend.spec.places import RunFolder, hold_lock


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
        cut_back(run.events, saved.state.events_bytes if saved else 0)
        cut_back(run.completions, saved.state.completions_bytes if saved else 0)
        trainer = Trainer(config, run, Diary(run.events, echo))
        return trainer.end(trainer.ending(lambda: trainer.run(saved, command)))
    finally:
        os.close(lock)


class Trainer:
    """One run. `state` stands for the last finished step; nothing of a step counts until its diary line is written."""

    kit: Kit

    def __init__(self, config: Config, run: RunFolder, diary: Diary) -> None:
        self.config = config
        self.folder = run
        self.diary = diary
        self.completions = JsonLines(run.completions)
        self.control = Control(run, diary)
        self.state = State()
        self.saved_step: int | None = None
        self._logged: dict[str, float] = {}
        self.phases = Phases(diary)
        before = (event["metrics"] for event in read_events(run.events) if event.get("kind") == "step")
        self.health = Health(diary, before)
        self._rewards_since_save: list[float] = []

    # ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, saved: checkpoint.Checkpoint | None, command: str) -> Ending:
        self.control.listen_to_signals()
        self.diary.write("phase", phase="loading")
        kit = load_kit(self.config, self.note)
        if saved is not None:
            kit.restore(saved)
            self.state, self.saved_step = saved.state, saved.state.step
        self.kit = kit  # whole from here on: what fails later is saved first
        self.tell_start(saved, command)
        if self._evaluation_due(self.state.step) and self.state.evaluated < self.state.step:
            self.evaluate(self.state.step)  # how good the model is to begin with; or a stop broke this off
        for step in range(self.state.step + 1, self.kit.steps + 1):
            self.step(step)
            self.after_step(step)
        if self.saved_step != self.state.step:
            self.save()
        self.finish()
        return Ending("finished", self.state.step, f"Finished after {self.state.step} steps.", 0)

    def step(self, step: int) -> None:
        """One rollout and its updates. A stop before the updates leaves the last finished step standing."""
        began = self.clock()
        mx.reset_peak_memory()
        groups, gathered = self.gather(step)
        reward_metrics = self.kit.judge.compare(groups, step)
        learn_metrics, train_s = self._timed(lambda: self.learn(groups))
        self._rewards_since_save.append(reward_metrics["reward"])
        made = completion_metrics(groups)
        trained = made["num_tokens"] * self.config.num_iterations
        self.state = replace(
            self.state, step=step, updates=self.kit.learner.updates, cursor=self.kit.deck.cursor,
            num_tokens=self.state.num_tokens + int(made["num_tokens"]),
            elapsed_s=self.state.elapsed_s + self.clock() - began,
        )  # fmt: skip
        told = made | gathered | reward_metrics | learn_metrics | self._logged | self.kit.judge.observe(groups, step)
        self.write(step, groups, told | {
            "num_tokens": self.state.num_tokens, "epoch": self.kit.deck.epoch,
            "train_tokens_per_second": trained / train_s, "time/train": train_s, "time/step": self.clock() - began,
            "peak_memory_gb": mx.get_peak_memory() / 1e9,
        })  # fmt: skip

    def gather(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """The step's scored groups, and what sampling and scoring took. With dynamic sampling, groups whose completions
        do not differ are put aside and more prompts drawn, up to a limit (DAPO, arXiv:2503.14476)."""
        wanted, config = self.config.prompts_per_step, self.config
        kept: list[Group] = []
        spare: list[Group] = []
        rollout_s = reward_s = 0.0
        for _ in range(config.dynamic_sampling_rounds if config.dynamic_sampling else 1):
            cursor = self.kit.deck.cursor
            problems = self.kit.deck.take(wanted - len(kept))
            groups, sampling_s = self._timed(lambda problems=problems, cursor=cursor: self.sample(problems, cursor))
            _, scoring_s = self._timed(lambda groups=groups: self.score(groups, step))
            rollout_s, reward_s = rollout_s + sampling_s, reward_s + scoring_s
            telling = [not config.dynamic_sampling or self.kit.judge.has_signal(group, step) for group in groups]
            kept += [group for group, tells in zip(groups, telling, strict=True) if tells]
            spare += [group for group, tells in zip(groups, telling, strict=True) if not tells]
            if len(kept) == wanted:
                break
        tokens = sum(len(one.tokens) for group in kept + spare for one in group.completions)
        took = {"time/rollout": rollout_s, "time/reward": reward_s, "rollout_tokens_per_second": tokens / rollout_s}
        if config.dynamic_sampling:
            took["dynamic_sampling/prompts"] = len(kept) + len(spare)
        return kept + spare[: wanted - len(kept)], took

    def sample(self, problems: list[Problem], place: int) -> list[Group]:
        room = len(problems) * self.config.group_size * self.config.max_completion_length

        def poll(drawn: int) -> None:
            self.phases.tell("sampling", drawn / room)
            self.control.obey(resting=mx.clear_cache)

        return self.kit.rollout.sample(
            problems, self.config.group_size, self.kit.sampling, self.config.seed, place, poll
        )

    def score(self, groups: list[Group], step: int) -> None:
        """Fill in scores and rewards."""
        self.phases.tell("scoring")
        self._logged = self.kit.judge.score(groups, step, self.kit.deck.epoch)
        self.control.obey(resting=mx.clear_cache)

    def learn(self, groups: list[Group]) -> dict[str, float]:
        def poll() -> None:
            self.phases.tell("learning")
            self.control.obey(may_stop=False, resting=mx.clear_cache)

        mx.clear_cache()
        masked = self.config.mask_truncated_completions
        batch = pack(groups, pad_id=self.kit.policy.pad_id, mask_truncated_completions=masked)
        return self.kit.learner.learn(batch, poll)

    def after_step(self, step: int) -> None:
        """Evaluate and save when due; see to words that had to wait for the step's end."""
        if self._evaluation_due(step):
            self.evaluate(step)
        if step % self.config.save_every == 0 or self.control.save_wanted:
            self.control.save_wanted = False
            self.save()
        self.control.obey(resting=mx.clear_cache)

    def tell_start(self, saved: checkpoint.Checkpoint | None, command: str) -> None:
        self.diary.write(
            "started", pid=os.getpid(), command=command, model=self.config.model, iterations=self.kit.steps,
            ranks=ranks.size(), device=str(mx.default_device()), versions=versions(),
            resumed_from=saved.state.step if saved else None,
        )  # fmt: skip
        if saved:  # its own line came after the place to which the diary is cut back
            self._tell_checkpoint(saved.path)
        for sentence in self.kit.judge.notes() + remarks(self.config.model_dump()):
            self.note(sentence)

    # ── beside ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _evaluation_due(self, step: int) -> bool:
        every = self.config.steps_per_eval
        return bool(self.kit.valid and every) and (step % every == 0 or step == self.kit.steps)

    def evaluate(self, step: int) -> None:
        metrics = self._held_out(self.kit.valid, self.config.val_batches)
        self.state.score, self.state.evaluated = _mean([metrics["reward"]]), step
        self.diary.write("eval", step=step, split="valid", metrics=metrics)

    def _held_out(self, problems: list[Problem], count: int) -> dict[str, float]:
        config, step = self.config, self.state.step
        stage = self.kit.judge.stage(step)

        def poll(done: float) -> None:
            self.phases.tell("evaluating", done)
            self.control.obey(resting=mx.clear_cache)

        return held_out_rewards(
            self.kit.rollout,
            problems,
            lambda groups: self.kit.judge.score(groups, step, self.kit.deck.epoch),
            stage.names,
            stage.weights.at(step),
            sampling=self.kit.sampling,
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
        if not (self.kit.valid and self.config.steps_per_eval):
            self.state.score = _mean(self._rewards_since_save)
        self._rewards_since_save = []
        for lines in (self.diary, self.completions):
            lines.sync()
        self.state.events_bytes, self.state.completions_bytes = self.diary.size, self.completions.size
        self.state.bonus, self.state.reward_weights = self.kit.learner.bonus.state(), self.kit.judge.state()
        full = self.config.train_type == "full"
        path = checkpoint.save(
            self.folder, self.state, self.kit.policy.trainable(), self.kit.learner.state_arrays(),
            self.kit.policy.reference_arrays() if self.config.sync_ref_model else None,
            whole_model=full, keep=self.config.keep_checkpoints,
        )  # fmt: skip
        if not full:
            self._save_adapters()
        self.saved_step = self.state.step
        self._tell_checkpoint(path)

    def _save_adapters(self) -> None:
        try:
            save_adapters(self.kit.policy, self.config, self.folder.adapters)
        except (OSError, RuntimeError) as error:
            where = f"The adapters of step {self.state.step} cannot be written to {self.folder.adapters}"
            raise Mistake("save_every", f"{where}: {error}.") from error

    def finish(self) -> None:
        """What comes after the last step: the test split, the complete model, LM Studio."""
        config = self.config
        if self.kit.test:
            self.diary.write(
                "eval", step=self.state.step, split="test", metrics=self._held_out(self.kit.test, config.test_batches)
            )
        if config.train_type == "full":
            save_model(self.kit.policy, config.model, self.folder.model)
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
        del self.kit
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

    def write(self, step: int, groups: list[Group], metrics: dict[str, float]) -> None:
        """The step's completions and its line. After this the step is done."""
        for group in groups:
            self.completions.append(group_line(step, group))
        told = self.diary.write("step", step=step, metrics=metrics)
        self.health.look(told["metrics"])

    def _tell_checkpoint(self, path: Path) -> None:
        self.diary.write("checkpoint", step=self.state.step, path=str(path.relative_to(self.folder.path)))

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
        for lines in (self.diary, self.completions):
            lines.close()
        return ending

    def _left(self, ending: Ending) -> Ending:
        """`ending`, once the last finished step is saved; where that fails too, a failure that says both."""

        def leave() -> Ending:
            if self.saved_step != self.state.step and self.between_steps:
                self.save()
            if ending.kind == "stopped" and self.config.train_type == "full":
                save_model(self.kit.policy, self.config.model, self.folder.model)
            return ending

        after = self.ending(leave)
        if ending.kind == "stopped" or after.sentence == ending.sentence:
            return after
        return after if after is ending else replace(after, sentence=f"{ending.sentence} {after.sentence}")

    @property
    def between_steps(self) -> bool:
        """Whether the weights are those of the last finished step: loaded, and not half-way through the next updates."""
        return "kit" in vars(self) and self.kit.learner.updates == self.state.updates

    def clock(self) -> float:
        """Seconds, on a clock that stands still in a pause."""
        return time.monotonic() - self.control.paused_s

    def _timed(self, work: Callable[[], Any]) -> tuple[Any, float]:
        began = self.clock()
        return work(), max(self.clock() - began, 1e-9)


def _mean(rewards: list[float]) -> float | None:
    """Their mean; None where no function had an opinion."""
    known = [reward for reward in rewards if not math.isnan(reward)]
    return sum(known) / len(known) if known else None
