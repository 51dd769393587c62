"""The training loop: take prompts, sample groups, score them, compute advantages, update the policy, log the step.
`backend.trainer.run_process` begins and ends a run's process."""

import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from backend.config.config import Config, origin_of
from backend.config.notes import config_notes
from backend.export.export_run import export_finished, exports_at_end
from backend.export.writer import adapter_config, model_bytes, save_model
from backend.judges.model_reward import UnreachableJudgeError
from backend.models.policy import load_start
from backend.runs import checkpoint
from backend.runs.events import Event, EventLog, JsonLines, read_events
from backend.runs.guards import DiskSpaceGuard, RunFolderGuard
from backend.runs.run_folder import RunFolder
from backend.runs.saved_weights import Checkpoint, DamagedCheckpoint, TrainingState, all_checkpoints, best_of
from backend.runs.start_progress import with_stop_check
from backend.runs.steering import MetricWatch, PlannedEnd, Steering, early_stop, stage_configs
from backend.sampling.conversations import tool_metrics
from backend.trainer.control import Control, Stopped
from backend.trainer.machine import GpuError, GpuErrorLog, KeepAwake, SlowdownWatch
from backend.trainer.not_finite import step_error
from backend.trainer.run_context import (
    PASS_RATE,
    LoadContext,
    RunContext,
    SamplingContext,
    SharedResources,
    load_context,
)
from backend.trainer.run_inputs import RunInputs
from backend.trainer.scoring import changed_files, fingerprints
from backend.trainer.telemetry import StepTimer, add_token_data, group_row, report_health, versions
from backend.training.batch import completion_metrics
from backend.training.not_finite import NotFiniteError
from backend.training.variety import variety_metrics
from backend.types import Group
from backend.utils.errors import UserError

RESTART = "restart"
PHASE_EVERY_S = 0.5  # least seconds between two `phase` events within a step


@dataclass(frozen=True, slots=True)
class Ending:
    """The event log's last kind, the step that the run reached, a sentence and an exit code. `reason` of a run that
    finished early: "stop_when" or "early_stopping". `ends_with`: the step whose weights a finished run leaves, where
    that is not its last. `lost_rank`: the machine without which it could not continue."""

    kind: str
    step: int
    sentence: str
    exit_code: int
    traceback: str = ""
    reason: str = ""
    ends_with: int | None = None
    gpu_error: GpuError | None = None
    gpu_text: str = ""
    lost_rank: int | None = None
    damaged: DamagedCheckpoint | None = None


class Trainer:
    """One run. `state`: after the last finished step; a step counts once its line is in the event log. `parts` is
    set once all is loaded, and deleted before exporting."""

    parts: RunContext

    def __init__(
        self, config: Config, run: RunFolder, event_log: EventLog, steering: Steering, *, keep_words: bool = False
    ) -> None:
        self.config = config  # of the present step
        self.steering = steering
        self._begun = 0  # the last step that has begun
        self.folder = run
        self.event_log = event_log
        self.completions = JsonLines(run.completions)
        self.gpu_errors = GpuErrorLog(run)
        self.keep_awake = KeepAwake()
        self.slowdowns = SlowdownWatch(self.note)
        self.held = RunFolderGuard(run)
        self.control = Control(run, event_log, keep_words=keep_words)
        self.control.before_pause = self.rest
        self.control.after_pause = self.keep_awake.start
        self.control.take_change = self.take_change
        self.control.looks.append(self.held.look)
        self.room = DiskSpaceGuard(run, event_log, self.control)
        self.state = TrainingState()
        self.saver = checkpoint.CheckpointWriter(run, event_log, self.completions, config.keep_checkpoints, self.clock)
        self.timer = StepTimer(self.clock)
        self._reported = 0.0  # when the present phase of a step was written last
        self.metrics = MetricWatch()
        self.reward_files: Mapping[str, str] = {}  # `fingerprints` when the last process of this run began
        report_health(event_log, steering.config_at(0).model_dump(), self._history())
        self.planned_end: PlannedEnd | None = None

    def _history(self) -> Iterator[Event]:
        for event in read_events(self.folder.events):
            self.steering.note_past(event)
            self.metrics.take(event)
            if event.get("kind") == "started":
                self.reward_files = event.get("reward_files") or self.reward_files
            yield event

    def load(
        self,
        saved: Checkpoint | None,
        command: str,
        inputs: RunInputs | None,
        *,
        load_parts: LoadContext = load_context,
        shared: SharedResources | None = None,
    ) -> None:
        """Load `parts`, in the state of `saved` if there is a checkpoint, and write `started`. `shared`: of a sweep,
        whose process handles the signals."""
        # Before the slow part: a signal while the model loads ends the run at its step, with a line in the event log.
        if saved is not None:
            self.state, self.saver.saved_step, self._begun = saved.state, saved.state.step, saved.state.step
        if shared is None:
            self.control.listen_to_signals()
        self.event_log.write("phase", phase="loading")
        self.keep_awake.start()
        maybe_set_recommended_wired_limit()  # on a Mac, keeps memory in use from being paged out
        stages = stage_configs(self.steering.config)
        if shared is None and saved is not None and saved.state.dtype and self.config.dtype == "auto":
            shared = SharedResources(None, (saved.state.dtype, ""))
        with with_stop_check(self.control.look_for_stop):
            parts = load_parts(self.config, self.note, inputs, self.gpu_errors.step_size, shared, stages)
            parts.scoring.scorer.load_models(self.folder.path)
        if saved is not None:
            parts.restore(saved, self.config, self.note)
            checkpoint.refresh_adapters(self.folder, saved, parts.policy, self.config)
        elif self.config.adapter:
            self.note(load_start(parts.policy, self.config, self.config.adapter, self.folder.path.parent))
        # Set only once restored: from here on a failure saves the run first, and half-restored parts must not be saved.
        self.take_parts(parts)
        self.state.dtype = parts.dtype
        parts.begin()
        files = fingerprints(self.config)
        self.event_log.write(
            "started",
            command=command,
            model=self.config.model,
            # By the settings of the next step: a resume may have lengthened the run.
            iterations=parts.steps_of(self.steering.config_at(self.state.step + 1)),
            **parts.of_ranks(),
            pid=os.getpid(),
            device=str(mx.default_device()),
            versions=versions(),
            resumed_from=saved.state.step if saved else None,
            **({"reward_files": files} if files else {}),
        )
        if warning := changed_files(self.reward_files, files, self.state.step):
            self.warn(warning)
        self.state.began = self.state.began or checkpoint.first_start(self.folder)
        if saved:  # its event came after the length to which the event log was cut back
            self.saver.tell(saved.state.step, saved.path)
        errors = self.gpu_errors.errors
        for error in errors[self.state.gpu_errors_told :]:  # the event log was cut back before their notes
            self.warn(error.sentence)
        self.state.gpu_errors_told = len(errors)
        algorithm, scoring = (parts.waiting_learner or parts.learner).algorithm, parts.scoring
        origin = [] if saved else filter(None, [origin_of(self.folder.config)])
        for sentence in [*origin, *algorithm.notes, *scoring.notes(), *config_notes(self.config), *parts.slow_paths]:
            self.note(sentence)
        # So that no later process needs the adapter, which may have changed by then.
        if saved is None and self.config.adapter:
            self.save_when_there_is_room()

    def take_parts(self, parts: RunContext) -> None:
        parts.scoring.poll = self.control.look_for_stop  # no function keeps the run from stopping
        parts.scoring.scorer.pause = self.pause_for_judge
        self.parts = parts

    def train_until(self, last: int | None) -> bool:
        """Train up to step `last`, or to the end; in many calls as in one. → True once the end is reached."""
        self.evaluate_if_due()  # before the first step, or where a stop interrupted this evaluation
        while last is None or self.state.step < last:
            if not self.begin(self.state.step + 1):
                return True
            self.step(self.state.step + 1)
            self.after_step(self.state.step)
        return False

    def begin(self, step: int) -> bool:
        """Apply the changes that hold from `step` on. → True if the run has such a step."""
        for change in self.steering.beginning_at(step):
            self.config = self.steering.config_at(step)
            self.parts.change(self.config, change.settings, step)
            checkpoint.begin_score_series(self.state, change.settings, self.config, self.score_metric)
            self.steering.log(change, self.event_log)
        if step > self.parts.steps:
            return False
        if self.parts.warms_up(step - 1):  # patience begins with the run's own mode
            self.state.scores_without_gain = 0
        stopped_early = early_stop(self.state, self.config, self.score_metric)
        self.planned_end = stopped_early or self.metrics.met(self.config.stop_when)
        if self.planned_end is not None:
            return False
        if self.control.finish_step_requested:
            raise Stopped("it was asked to stop at the end of the step")
        self._begun = step
        return True

    def step(self, step: int) -> None:
        """One rollout and its updates. A stop before the updates leaves the run at its last finished step."""
        self.timer = StepTimer(self.clock, self.timer.use)
        work = SamplingContext(self.timer, self.poll, self.report)

        def poll_learning() -> None:
            self.report("learning")
            # A stop between two updates of one rollout would leave weights that belong to no step.
            self.control.obey(may_stop=False)

        try:
            metrics, logged = self.parts.collect_groups(step, self.config, work)
            self.saver.wait()  # the step before may still be on its way to disk, and the weights change now
            with self.timer.phase("train"):
                metrics |= self.parts.learn(work.groups, self.config, poll_learning)
        except NotFiniteError as found:
            raise step_error(self.config, self.folder, step, found, work.groups) from found
        metrics |= logged | self.parts.scoring.update_weights(work.groups, step)
        self.write_step(step, work.groups, metrics)
        if self.parts.waiting_learner is not None:
            self.end_warmup_if_due(step, metrics.get(PASS_RATE))

    def end_warmup_if_due(self, step: int, rate: float | None) -> None:
        goal = self.config.warmup_pass_rate
        if rate is not None and 0 < goal <= rate:
            solves = f"one of {self.config.group_size} completions solves {rate:.0%} of the prompts"
            why = f": {solves}, and its goal was {goal:.0%}"
        elif step >= self.config.warmup_steps:
            why = ", its last"
        else:
            return
        self.parts.end_warmup(step, self.config)
        if self.config.moves_reference:
            self.parts.policy.move_reference(1.0)
        self.state = replace(self.state, warmup_end=step, updates=0)
        self.note(
            f"The supervised warm-up ended after step {step}{why}. From here on the mode is {self.config.train_mode}."
        )

    def report(self, phase: str, progress: float | None = None) -> None:
        if (now := time.monotonic()) - self._reported >= PHASE_EVERY_S:
            self._reported = now
            self.event_log.write("phase", phase=phase, **({} if progress is None else {"progress": round(progress, 3)}))

    def poll(self, phase: str, progress: float | None = None) -> None:
        self.report(phase, progress)
        if self.saver.is_done:  # so that its event follows soon after the files
            self.saver.wait()
        self.control.obey()

    def write_step(self, step: int, groups: list[Group], metrics: dict[str, float]) -> None:
        """Write the step's completions, then its line in the event log. From then on the step is finished."""
        parts, config = self.parts, self.config
        lengths = completion_metrics(groups)
        samples = not parts.reads_labels(step, config)
        sampled = groups if samples else []
        rows = [group_row(step, group) for group in sampled]
        if config.record_tokens:
            records, is_masked = parts.learner.algorithm.token_records, config.mask_truncated_completions
            add_token_data(rows, sampled, records, parts.policy.tokenizer, mask_truncated=is_masked)
        # Completions first: a reader that sees the step's line in the event log finds its completions in their file.
        for row in rows:
            self.completions.append(row)
        stream = parts.prompt_stream
        state = replace(
            self.state,
            step=step,
            updates=parts.learner.updates,
            cursor=stream.cursor,
            stream_first=stream.first,
            ended_epoch=stream.ended_epoch(self.state.cursor),
            num_tokens=self.state.num_tokens + int(lengths["num_tokens"]),
            elapsed_s=self.state.elapsed_s + self.timer.elapsed(),
        )
        trained_tokens = lengths["num_tokens"] * (config.num_iterations if samples else 1)
        saving_s = self.saver.take_seconds()  # the time of step N is reported with step N + 1
        save_time = {"time/save": saving_s} if saving_s else {}
        of_step = {
            "num_tokens": state.num_tokens,
            "epoch": parts.prompt_stream.epoch,
            "train_tokens_per_second": self.timer.rate(trained_tokens, "train"),
        }
        lengths |= variety_metrics(sampled) | tool_metrics(sampled) if sampled else {}
        metrics = lengths | metrics | save_time | of_step | self.timer.metrics()
        event = self.event_log.write("step", step=step, metrics=metrics)
        if parts.prompt_stream.pass_rates is not None:
            parts.prompt_stream.pass_rates.finish_step()
        self.state = state  # once its line is written: a step that the event log lacks is in no checkpoint
        self.metrics.take(event)
        checkpoint.take_step_score(self.state, event["metrics"], self.score_metric)
        if self._is_turn(self.config.save_every):  # here, so that no stop comes between the step and its score
            checkpoint.close_interval(self.state, self.config, self.score_metric)

    def after_step(self, step: int) -> None:
        """Evaluate and save when due; obey commands that had to wait for the end of the step."""
        self.evaluate_if_due()
        self.room.wait()
        wants_best = self.config.early_stopping_patience > 0 or self.config.load_best_at_end
        is_due = self._is_turn(self.config.save_every) or (wants_best and self.state.best_step == step)
        if is_due or self.control.save_requested:
            self.control.save_requested = False
            self.save_when_there_is_room()
        for sentence in self.parts.new_notes():
            self.note(sentence)
        for sentence in () if self.parts.warms_up(step) else self.metrics.new_warnings(self.config.stop_when):
            self.warn(sentence)
        self.slowdowns.look()
        self.control.obey()

    @property
    def has_evaluations(self) -> bool:
        return bool(self.parts.evaluation_sets and self.config.steps_per_eval)

    @property
    def score_metric(self) -> str:
        return checkpoint.metric_of(self.config, has_evaluations=self.has_evaluations)

    def _is_turn(self, every: int) -> bool:
        return self.state.step % every == 0 if every > 0 else self.state.ended_epoch

    def evaluate_if_due(self) -> None:
        step = self.state.step
        is_turn = self._is_turn(self.config.steps_per_eval) and step >= self.config.eval_delay
        is_due = self.has_evaluations and (is_turn or step in (0, self.parts.steps))
        if is_due and self.state.evaluated < step:
            self.evaluate("valid")

    def evaluate(self, split: str) -> None:
        step, began = self.state.step, self.clock()
        metrics = self.parts.evaluate(split, step, self.config, lambda done: self.poll("evaluating", done))
        mx.synchronize()  # raises what has failed on the GPU, before the figures count
        took = {"time/eval": self.clock() - began}
        self.metrics.take(self.event_log.write("eval", step=step, split=split, metrics=metrics | took))
        if split == "valid":
            checkpoint.take_evaluation_score(self.state, metrics, self.config, self.score_metric)

    def complete(self) -> Ending:
        self.evaluate_if_due()  # of a run that was shortened to the steps that it has done
        self.saver.wait()
        if self.saver.saved_step != self.state.step:
            self.save_when_there_is_room()
            self.saver.wait()
        config, step = self.config, self.state.step
        ends_with = self.load_best() if config.load_best_at_end else None
        early, steps = self.planned_end, self.parts.steps
        if self.parts.test:
            self.evaluate("test")
        if config.train_type == "full":
            self.room.wait(model_bytes(self.parts.policy))
            save_model(self.parts.policy, config, self.folder.model)
        if exports_at_end(config):
            self.event_log.write("phase", phase="exporting")
            self.parts.close()
            del self.parts  # fusing loads the model again, and two of them may not fit in memory
            mx.clear_cache()
            export_finished(config, self.folder, self.event_log)
        reason, why = early or ("", "")
        count = f"{step} of {steps} steps. {why}" if early else f"{step} step{'' if step == 1 else 's'}"
        return Ending("finished", step, f"Finished after {count}.", 0, reason=reason, ends_with=ends_with)

    def load_best(self) -> int | None:
        """Load the weights of the best checkpoint into the policy and `adapters/`. → its step, if they are not those of
        the last one. Raises UserError."""
        best = best_of(all_checkpoints(self.folder))
        if best is None:
            self.note("No checkpoint of this run has a score, so it ends with the weights of its last step.")
            return None
        score = f"{best.state.score_metric or 'reward'} {best.state.score:.4g}"
        if best.step == self.state.step:
            self.note(f"The last step is the best, with {score}: the run ends with its weights.")
            return None
        policy = self.parts.policy
        policy.assign(checkpoint.arrays_of(best, "weights"))
        if self.config.train_type != "full":
            checkpoint.publish_adapters(self.folder, best.weights_file, adapter_config(policy, self.config))
        has_before = self.state.best_step == 0 and self.state.best_score is not None
        before = f" The model before training had {self.state.best_score:.4g}." if has_before else ""
        self.note(f"The run ends with the weights of step {best.step}, its best checkpoint, with {score}.{before}")
        return best.step

    def save_when_there_is_room(self) -> None:
        policy, config = self.parts.policy, self.config
        arrays = [policy.trainable()] * (1 if config.train_type == "full" else 2)  # adapters/ has them too
        arrays += [] if config.save_only_model else [self.parts.learner.state_arrays()]
        arrays += [policy.reference_arrays()] if config.moves_reference else []
        self.room.wait(sum(array.nbytes for group in arrays for array in group.values()))
        self.save()

    def save(self) -> None:
        self.saver.begin(self._snapshot)

    def save_without_gpu(self) -> None:
        """Save the last step on the CPU: after an error the GPU may refuse all further work. Prints errors."""
        try:
            if self.has_unsaved_step():
                with mx.stream(mx.cpu):
                    self.saver.write_here(self._snapshot())
        except UserError as error:
            sys.stderr.write(f"{error}\n")
        except (RuntimeError, MemoryError):
            traceback.print_exc()

    def has_unsaved_step(self) -> bool:
        with suppress(UserError):  # a checkpoint that could not be written is tried once more
            self.saver.wait()
        if self.has_parts and not self.has_whole_step:  # a step was interrupted between its updates
            self.parts.take_back()
        return self.saver.saved_step != self.state.step and self.has_whole_step

    def _snapshot(self) -> checkpoint.Snapshot:
        self.event_log.write("phase", phase="saving")
        checkpoint.score_checkpoint(self.state, self.config, self.score_metric)
        # Read last: both files up to these lengths hold the steps of this checkpoint and nothing of later ones.
        self.state.events_bytes, self.state.completions_bytes = self.event_log.size, self.completions.size
        self.state.bonus, self.state.reward_weights = self.parts.learner.algorithm.state(), self.parts.scoring.state()
        pass_rates = self.parts.prompt_stream.pass_rates
        arrays = pass_rates.arrays() if pass_rates is not None else None
        return checkpoint.snapshot(self.state, self.parts.policy, self.parts.learner, self.config, arrays)

    def take_change(self) -> None:
        level, sentence = self.steering.take(self._begun)
        self.event_log.write("note", level=level, sentence=sentence, answers="change")

    def pause_for_judge(self, error: UnreachableJudgeError) -> None:
        sentence = f"{error.faults[0].sentence} The run is paused; resume it once the server answers."
        self.event_log.write("note", level="warning", sentence=sentence, during="pause")
        self.control.pause_until(lambda: False, sentence)
        self.control.obey()

    def rest(self) -> None:
        self.saver.wait()
        self.parts.rest()
        self.keep_awake.stop()

    @property
    def has_parts(self) -> bool:
        """False before `load`, in a sweep while other runs have their turns, and while exporting."""
        return "parts" in vars(self)

    @property
    def has_whole_step(self) -> bool:
        """True if the weights belong to the last finished step, and no update of the next one has begun."""
        return self.has_parts and self.parts.learner.is_whole and self.parts.learner.updates == self.state.updates

    def close(self) -> None:
        self.keep_awake.stop()
        for part in (self.held, self.timer.use, self.saver):
            part.close()
        if self.has_parts:
            self.parts.close()
            # Compiled functions may refer to the trainer, in a cycle that Python does not see.
            del self.parts
        for log in (self.event_log, self.completions):
            log.close()

    def warn(self, sentence: str) -> None:
        self.event_log.write("note", level="warning", sentence=sentence)

    def note(self, sentence: str) -> None:
        self.event_log.write("note", level="info", sentence=sentence)

    def clock(self) -> float:
        """Seconds, on a clock that stops during a pause."""
        return time.monotonic() - self.control.paused_s
