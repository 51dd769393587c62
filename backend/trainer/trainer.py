"""The training loop: take prompts, sample groups, score them, compute advantages, update the policy, log the step.

How a run's process begins and ends, errors included, is in `backend.trainer.run_process`; the update itself is in `backend.training`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from backend.config.config import Config
from backend.export.final_export import export_finished, exports
from backend.models.policy import Policy
from backend.models.saving import adapter_config, model_bytes, save_model
from backend.models.start_adapter import load_start
from backend.runs.checkpoints.checkpoint import Checkpoint, TrainingState, first_start, read_checkpoint
from backend.runs.checkpoints.checkpoint_score import CheckpointScore
from backend.runs.checkpoints.checkpoint_writer import RunSaver, Snapshot, publish_adapters, refresh_adapters, snapshot
from backend.runs.events import EventLog, JsonLines, read_events
from backend.runs.held_folder import RunFolderGuard
from backend.runs.room_for_saving import DiskSpaceGuard
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import best_of, saved_weights
from backend.runs.start_progress import with_stop_check
from backend.runs.steering import Change
from backend.trainer import not_finite, scoring
from backend.trainer.control import Control, Stopped
from backend.trainer.ending import Ending
from backend.trainer.machine import GpuErrorLog, KeepAwake, SlowdownWatch, StepSize
from backend.trainer.run_context import (
    LoadContext,
    Poll,
    RunContext,
    SamplingContext,
    SharedResources,
    load_context,
    recorded_tokens,
)
from backend.trainer.run_inputs import RunInputs
from backend.trainer.steering import MetricWatch, PlannedEnd, Steering, patience_is_over
from backend.trainer.telemetry import HealthReporter, PhaseReporter, StepTimer, group_row, of_process
from backend.training.batch import completion_metrics
from backend.training.variety import variety_metrics
from backend.types import Group

# The groups of a step: prompts taken, completions sampled and scored; with dynamic sampling, groups without a
# gradient replaced.


@dataclass(slots=True)
class GroupCollection:
    """Collects the groups of one step. `logged` holds the metrics that reward functions logged in the last round."""

    parts: RunContext
    config: Config
    timer: StepTimer
    poll: Poll
    report: Callable[[str], None]
    logged: dict[str, float] = field(default_factory=dict)
    batch: list[Group] = field(default_factory=list)
    """The groups of the step: all that were sampled so far, and once they are chosen, those alone."""

    def collect(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """The step's scored groups, and the metrics of their rollout.

        Dynamic sampling (DAPO, arXiv:2503.14476, eq. 11): a group whose completions all have the same reward has advantage
        0 and no gradient. Such groups are set aside and replaced by groups of new prompts, in at most
        `dynamic_sampling_rounds` rounds; groups that are still missing then are filled from those set aside, so that the
        step's size never varies. Prompts are taken from the stream in order, so the choice depends neither on chance nor on
        timing.
        """
        count, dynamic = self.config.prompts_per_step, self.config.dynamic_sampling
        kept: list[Group] = []
        without_gradient: list[Group] = []
        for _ in range(self.config.dynamic_sampling_rounds if dynamic else 1):
            for group in self._sample_and_score(count - len(kept), step):
                has_gradient = not dynamic or self.parts.scoring.has_nonzero_advantage(group, step)
                (kept if has_gradient else without_gradient).append(group)
            if len(kept) == count:
                break
        sampled = kept + without_gradient
        tokens = sum(completion.trained_tokens for group in sampled for completion in group.completions)
        metrics = {"rollout_tokens_per_second": self.timer.rate(tokens, "rollout")}
        if dynamic:
            metrics["dynamic_sampling/prompts"] = len(sampled)
        self.batch[:] = sampled[:count]
        return self.batch, metrics

    def _sample_and_score(self, count: int, step: int) -> list[Group]:
        """Take the next `count` prompts, sample a group of completions for each, and score them."""
        stream, already = self.parts.prompt_stream, len(self.batch)
        position = stream.cursor  # with the seed, it fixes the random numbers of these completions
        work = SamplingContext(self.timer, self.poll, self.report, self.batch)
        self.logged = self.parts.sample_and_score(stream.take(count), position, step, self.config, work)
        return self.batch[already:]


# ── best at end ──────────────────────────────────────────────────────────────────────────────────────────────────────

# The end of a run with its best checkpoint: what it leaves is of that step, and its checkpoints stay as they are.


def load_best(
    run: RunFolder, policy: Policy, config: Config, state: TrainingState, note: Callable[[str], None]
) -> int | None:
    """Give the policy, and `adapters/`, the weights of the best checkpoint. → its step; None where that is the last, or none has a score.
    `note` takes the sentence for the event log. Raises DiskError, and UserError for a damaged checkpoint."""
    best = best_of(saved_weights(run))
    saved = read_checkpoint(best.path) if best is not None else None
    if best is None or saved is None:
        note("No checkpoint of this run has a score, so it ends with the weights of its last step.")
        return None
    metric, score = best.metric or "reward", f"{best.score:.4g}"
    if best.step == state.step:
        note(f"The last step is the best, with {metric} {score}: the run ends with its weights.")
        return None
    policy.assign(saved.weights())
    if config.train_type != "full":
        publish_adapters(run, saved.weights_file, adapter_config(policy, config))
    before = ""
    if state.best_step == 0 and state.best_score is not None:
        before = f" The model before training had {state.best_score:.4g}."
    note(f"The run ends with the weights of step {best.step}, its best checkpoint, with {metric} {score}.{before}")
    return best.step


# ── due ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

# When a run evaluates and saves, by the number of the step. Does neither.


def evaluation_is_due(config: Config, step: int, steps: int) -> bool:
    """Whether held-out prompts are answered after `step`, of a run of `steps` that has such prompts."""
    is_turn = step % config.steps_per_eval == 0 and (step == 0 or step >= config.eval_delay)
    return is_turn or step == steps


def is_best_worth_saving(config: Config, state: TrainingState, step: int) -> bool:
    """Whether the weights of `step` are the best so far and asked for by name: early stopping names them, and a run may end with them."""
    wants_best = config.early_stopping_patience > 0 or config.load_best_at_end
    return wants_best and state.best_step == step


# ── trainer ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Trainer:
    """One run. `state` is that of the last finished step: a step counts once its line is in the event log."""

    parts: RunContext
    """Set once all of them are loaded, deleted before exporting: a run without parts has nothing to save."""

    load_context: LoadContext = staticmethod(load_context)
    """What builds the parts: where several ranks share the work, the leader's."""
    shared: SharedResources | None = None
    """What the run has in common with others of this process, which has its signals for all of them then."""

    def __init__(
        self, config: Config, run: RunFolder, event_log: EventLog, steering: Steering, *, keep_words: bool = False
    ) -> None:
        """`config`: the settings of the checkpoint's step. `keep_words`: as in `Control`."""
        self.config = config
        """The settings of the present step."""
        self.steering = steering
        self._begun = 0
        """The last step that has begun."""
        self.folder = run
        self.event_log = event_log
        self.completions = JsonLines(run.completions)
        self.gpu_errors = GpuErrorLog(run)
        self.keep_awake = KeepAwake(self.warn)
        self.slowdowns = SlowdownWatch(self.note)
        self.held = RunFolderGuard(run, event_log, self.completions, self.warn)
        self.control = Control(
            run, event_log, look=self.held.look, before_pause=self.rest, after_pause=self.keep_awake.start, take_change=self.take_change,
            keep_words=keep_words,
        )  # fmt: skip
        self.room = DiskSpaceGuard(run, event_log, self.control)
        self.state = TrainingState()
        self.saver = RunSaver(run, event_log, self.completions, config.keep_checkpoints, self.clock)
        self.timer = StepTimer(self.clock)
        self.phases = PhaseReporter(event_log)
        # It follows the event log, which keeps it, and reads later changes of settings there.
        HealthReporter(event_log, steering.config_at(0).model_dump())
        self.metrics = MetricWatch(steering.noting_changes(read_events(run.events)))
        self.planned_end: PlannedEnd | None = None
        self.ends_with: int | None = None
        """The step of the checkpoint that the run leaves at its end, where that is not the last."""
        self.score = CheckpointScore()

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, saved: Checkpoint | None, command: str, inputs: RunInputs | None = None) -> Ending:
        self.load(saved, command, inputs)
        self.train_until(None)
        return self.complete()

    def train_until(self, last: int | None) -> bool:
        """Train up to step `last`, or to the end; in many calls as in one. → whether the end was reached."""
        self.evaluate_if_due()  # before the first step, or where a stop interrupted this evaluation
        while last is None or self.state.step < last:
            if not self.begin(self.state.step + 1):
                return True
            self.step(self.state.step + 1)
            self.after_step(self.state.step)
        return False

    def complete(self) -> Ending:
        """After the last step: what is not evaluated or saved yet, and the end."""
        self.evaluate_if_due()  # of a run that was shortened to the steps that it has done
        self.saver.wait()
        if self.saver.saved_step != self.state.step:
            self.save_when_there_is_room()
            self.saver.wait()
        if self.config.load_best_at_end:
            self.ends_with = load_best(self.folder, self.parts.policy, self.config, self.state, self.note)
        return self.ended()

    def begin(self, step: int) -> bool:
        """Take up the changes that hold from `step` on. → whether the run has such a step; raises Stopped if it should go no further."""
        for change in self.steering.beginning_at(step):
            self.apply(change)
        if step > self.parts.steps:
            return False
        self.planned_end = patience_is_over(
            self.state, self.config, has_evaluations=self._has_evaluations
        ) or self.metrics.met(self.config.stop_when)
        if self.planned_end is not None:
            return False
        if self.control.finish_step_requested:
            raise Stopped("it was asked to stop at the end of the step")
        self._begun = step
        return True

    def apply(self, change: Change) -> None:
        """Go on with other settings, from the step that is about to begin."""
        self.config = self.steering.config_at(change.step)
        self.parts.change(self.config, change.settings, change.step)
        self.score.begin_stage(self.state, change.settings, self.config, has_evaluations=self._has_evaluations)
        self.steering.tell(change, self.event_log)

    def take_change(self) -> None:
        """Record the change that was asked for, and answer in a note: from which step it holds, or why it cannot be."""
        level, sentence = self.steering.take(self._begun)
        self.event_log.write("note", level=level, sentence=sentence, answers="change")

    def step(self, step: int) -> None:
        """One rollout and its updates. A stop before the updates leaves the run at its last finished step."""
        self.timer = self.timer.of_next_step()
        collection = GroupCollection(self.parts, self.config, self.timer, self.poll, self.phases.report)
        with not_finite.ends_run(self.config, self.folder, step, collection.batch):
            groups, rollout_metrics = collection.collect(step)
            reward_metrics = self.parts.scoring.fill_advantages(groups, step)
            self.saver.wait()  # the step before may still be on its way to disk, and the weights change now
            with self.timer.phase("train"):
                learn_metrics = self.parts.learn(groups, self.config, self.poll_learning)
        weight_metrics = self.parts.scoring.update_weights(groups, step)
        self.write_step(
            step, groups, rollout_metrics | reward_metrics | learn_metrics | collection.logged | weight_metrics
        )

    def poll(self, phase: str, progress: float | None = None) -> None:
        """Between two bursts of work that a stop may throw away: report, and obey."""
        self.phases.report(phase, progress)
        if self.saver.is_done:  # so that its event follows soon after the files
            self.saver.wait()
        self.control.obey()

    def poll_learning(self) -> None:
        self.phases.report("learning")
        # Between two updates of one rollout a pause does no harm, but a stop would leave weights that belong to no step.
        self.control.obey(may_stop=False)

    def write_step(self, step: int, groups: list[Group], metrics: dict[str, float]) -> None:
        """Write the step's completions, then its line in the event log. From then on the step is finished."""
        lengths = completion_metrics(groups)
        # Completions first: a reader that sees the step's line in the event log finds its completions in their file.
        for group, token_data in zip(groups, recorded_tokens(self.config, self.parts, groups), strict=True):
            self.completions.append(group_row(step, group, token_data))
        state = replace(
            self.state, step=step, updates=self.parts.learner.updates, cursor=self.parts.prompt_stream.cursor,
            stream_first=self.parts.prompt_stream.first,
            num_tokens=self.state.num_tokens + int(lengths["num_tokens"]),
            elapsed_s=self.state.elapsed_s + self.timer.elapsed(),
        )  # fmt: skip
        trained_tokens = lengths["num_tokens"] * self.config.num_iterations
        saving_s = self.saver.take_seconds()  # that of step N is reported with step N + 1
        save_time = {"time/save": saving_s} if saving_s else {}
        event = self.event_log.write("step", step=step, metrics=lengths | variety_metrics(groups) | metrics | save_time | {
            "num_tokens": state.num_tokens, "epoch": self.parts.prompt_stream.epoch,
            "train_tokens_per_second": self.timer.rate(trained_tokens, "train"),
        } | self.timer.metrics())  # fmt: skip
        self.state = state  # once its line is written: a step that the event log lacks is in no checkpoint
        self.metrics.take(event)
        self.score.take_step(event["metrics"], self.config, has_evaluations=self._has_evaluations)

    def after_step(self, step: int) -> None:
        """Evaluate and save when due; obey commands that had to wait for the end of the step."""
        if self._evaluation_due(step):
            self.evaluate(step)
        self.room.wait()
        is_due = step % self.config.save_every == 0
        if is_due:
            self.score.observe_save(self.state, self.config, has_evaluations=self._has_evaluations)
        if is_due or is_best_worth_saving(self.config, self.state, step) or self.control.save_requested:
            self.control.save_requested = False
            self.save_when_there_is_room()
        for sentence in self.parts.new_notes():
            self.note(sentence)
        for sentence in self.metrics.new_warnings(self.config.stop_when):
            self.warn(sentence)
        self.slowdowns.look()
        self.control.obey()

    # ── before the first step ────────────────────────────────────────────────────────────────────────────────────────

    def load(self, saved: Checkpoint | None, command: str, inputs: RunInputs | None) -> None:
        """Load the run's parts, in the state of `saved` if there is a checkpoint, and write `started`."""
        # Before the slow part: a signal while the model loads then ends the run with a line in the event log.
        if self.shared is None:
            self.control.listen_to_signals()
        self.event_log.write("phase", phase="loading")
        self.keep_awake.start()
        maybe_set_recommended_wired_limit()  # on a Mac, keeps memory in use from being paged out; elsewhere it does nothing
        stages = self.steering.stage_configs()
        with with_stop_check(self.control.look_for_stop):
            parts = self.load_context(self.config, self.note, inputs, self.gpu_errors.step_size, self.shared, stages)
        if saved is not None:
            parts.restore(saved, self.note)
            refresh_adapters(self.folder, saved, parts.policy, self.config)
            self.state, self.saver.saved_step = saved.state, saved.state.step
            self._begun = saved.state.step
        elif self.config.adapter:
            self.note(load_start(parts.policy, self.config, self.config.adapter, self.folder.path.parent))
        # Set only once restored: from here on a failure saves the run first, and half-restored parts must not be saved.
        self.take_parts(parts)
        parts.begin()
        self.write_started(saved, command)
        # So that no later process needs the adapter, which may have changed by then.
        if saved is None and self.config.adapter:
            self.save_when_there_is_room()

    def take_parts(self, parts: RunContext) -> None:
        parts.scoring.poll = self.control.look_for_stop  # no function keeps the run from stopping
        self.parts = parts

    def write_started(self, saved: Checkpoint | None, command: str) -> None:
        # Of the settings of the next step: a resume may have lengthened the run.
        steps = self.parts.steps_of(self.steering.config_at(self.state.step + 1))
        of_run = {"command": command, "model": self.config.model, "iterations": steps} | self.parts.of_ranks()
        code = scoring.fingerprints(self.config)
        has_changed = scoring.change_since(self.folder, code, self.state.step)
        resumed_from = saved.state.step if saved else None
        self.event_log.write(
            "started", **of_run, **of_process(), resumed_from=resumed_from, **({"reward_files": code} if code else {})
        )
        if has_changed:
            self.warn(has_changed)
        self.state.began = self.state.began or first_start(self.folder)
        if saved:  # its event came after the length to which the event log was cut back
            self.saver.tell(saved.state.step, saved.path)
        for error in self.gpu_errors.errors[
            self.state.gpu_errors_told :
        ]:  # the event log was cut back before their notes
            self.warn(error.sentence)
        self.state.gpu_errors_told = len(self.gpu_errors.errors)
        for sentence in self.parts.first_notes(self.config):
            self.note(sentence)

    # ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _has_evaluations(self) -> bool:
        return bool(self.parts.evaluation_sets and self.config.steps_per_eval)

    def _evaluation_due(self, step: int) -> bool:
        return self._has_evaluations and evaluation_is_due(self.config, step, self.parts.steps)

    def evaluate_if_due(self) -> None:
        """Evaluate after the last finished step, unless that is done already."""
        if self._evaluation_due(self.state.step) and self.state.evaluated < self.state.step:
            self.evaluate(self.state.step)

    def evaluate(self, step: int) -> None:
        metrics = self._held_out("valid", lambda poll: self.parts.evaluate(step, self.config, poll))
        self.score.take_evaluation(self.state, metrics, self.config)

    def _held_out(self, split: str, measure: Callable[[Callable[[float], None]], dict[str, float]]) -> dict[str, float]:
        """Held-out rewards after the last finished step, written to the event log."""
        step, began, metrics = self.state.step, self.clock(), measure(lambda done: self.poll("evaluating", done))
        mx.synchronize()  # as in `RunContext.learn`
        took = {"time/eval": self.clock() - began}
        self.metrics.take(self.event_log.write("eval", step=step, split=split, metrics=metrics | took))
        return metrics

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────

    def save_when_there_is_room(self) -> None:
        """`save`, after a pause where the disk is nearly full. Raises Stopped."""
        self.room.wait(lambda: self.parts.checkpoint_bytes(self.config))
        self.save()

    def save(self) -> None:
        """Begin a checkpoint of the last finished step. It is written while the next step samples; `saver.wait` writes its event."""
        self.saver.begin(self._snapshot)

    def _snapshot(self) -> Snapshot:
        """The last finished step, with the state of everything that a checkpoint holds."""
        self.event_log.write("phase", phase="saving")
        self.score.close_interval(self.state, self.config, has_evaluations=self._has_evaluations)
        # Read last: both files up to these lengths hold the steps of this checkpoint and nothing of later ones.
        self.state.events_bytes, self.state.completions_bytes = self.event_log.size, self.completions.size
        self.state.bonus, self.state.reward_weights = self.parts.learner.algorithm.state(), self.parts.scoring.state()
        return snapshot(self.state, self.parts.policy, self.parts.learner, self.config)

    def rest(self) -> None:
        """Before a pause: finish the checkpoint being written, give MLX's cached buffers back to the system, and let it sleep."""
        self.saver.wait()
        self.parts.rest()
        self.keep_awake.stop()

    def save_without_gpu(self) -> None:
        """Save the last finished step, in this thread and on the CPU: after an error the GPU may refuse all further work. The arrays are
        evaluated, and on a Mac the CPU reads them where they are."""
        with mx.stream(mx.cpu):
            self.saver.write_here(self._snapshot())

    @property
    def step_size(self) -> StepSize:
        """How much of a step this process has computed at once."""
        return self.parts.step_size(self.config) if self.has_parts else self.gpu_errors.step_size

    @property
    def has_parts(self) -> bool:
        """Whether the run is loaded: not before `load`, not in a sweep while other runs have their turns, and not while exporting."""
        return "parts" in vars(self)

    @property
    def has_whole_step(self) -> bool:
        """Whether the weights are those of the last finished step: loaded, and neither in nor between the next step's updates."""
        return self.has_parts and self.parts.learner.is_whole and self.parts.learner.updates == self.state.updates

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def ended(self) -> Ending:
        """After the last step: everything that follows it, and the sentence for it."""
        step, early = self.state.step, self.planned_end
        of = f" of {self.parts.steps}" if early else ""
        sentence = f"Finished after {step}{of} steps{f'. {early.sentence}' if early else ''}."
        self.finish()
        return Ending("finished", step, sentence, 0, reason=early.reason if early else "", ends_with=self.ends_with)

    def finish(self) -> None:
        """After the last step: the test split, the model of full fine-tuning, the exports."""
        config = self.config
        if self.parts.test:
            self._held_out("test", lambda poll: self.parts.test_metrics(self.state.step, config, poll))
        if config.train_type == "full":
            self.room.wait(lambda: model_bytes(self.parts.policy))
            save_model(self.parts.policy, config, self.folder.model)
        if not exports(config):
            return
        self.event_log.write("phase", phase="exporting")
        self.parts.close()
        del self.parts  # fusing loads the model again, and two of them may not fit in memory
        mx.clear_cache()
        export_finished(config, self.folder, self.event_log)

    def move_to(self, folder: RunFolder) -> None:
        """Go on in another place: the run's folder was moved there, with the files that are open."""
        self.folder = self.control.run = folder
        self.saver.move_to(folder)

    def close(self) -> None:
        """Let the machine sleep, close threads and files, and let go of the model."""
        self.keep_awake.stop()
        for part in (self.held, self.timer, self.saver):
            part.close()
        if self.has_parts:
            self.parts.close()
            del (
                self.parts
            )  # what mlx has compiled of them may refer to the trainer, in a cycle that Python does not see
        for log in (self.event_log, self.completions):
            log.close()

    def warn(self, sentence: str) -> None:
        self.event_log.write("note", level="warning", sentence=sentence)

    def note(self, sentence: str) -> None:
        self.event_log.write("note", level="info", sentence=sentence)

    def clock(self) -> float:
        """Seconds, on a clock that stops during a pause."""
        return time.monotonic() - self.control.paused_s
