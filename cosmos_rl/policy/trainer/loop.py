"""The loop that all jobs share: step, validate, log, save, stop."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmos_rl.checkpoint import hub
from cosmos_rl.checkpoint.card import write_card
from cosmos_rl.checkpoint.layout import list_whole_steps, policy_dir, step_dir
from cosmos_rl.checkpoint.manager import CheckpointManager, SaveJob, WriteExport, read_trainer_state
from cosmos_rl.checkpoint.state import AVERAGE, collect, restore
from cosmos_rl.distributed.context import Context
from cosmos_rl.distributed.memory import memory_phase
from cosmos_rl.distributed.phase import enter_phase
from cosmos_rl.errors import TrainingStoppedError, UserError
from cosmos_rl.optim.optimizer import Refusal
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.model.digest import find_folder
from cosmos_rl.policy.model.driver.rows import find_absent
from cosmos_rl.policy.trainer import same_run
from cosmos_rl.policy.trainer.peers import compare_fingerprints
from cosmos_rl.policy.trainer.task import Alarm, HookFn, LoggerFn, StopRequest, Task
from cosmos_rl.storage.run_folder import RunFolder, begin_run
from cosmos_rl.tracking.console import Console
from cosmos_rl.tracking.live import LiveDisplay
from cosmos_rl.tracking.loggers import MetricLogger, require_installed, start_loggers
from cosmos_rl.tracking.media import Shown, build_caption, save_gallery
from cosmos_rl.tracking.metrics import MetricsFile
from cosmos_rl.tracking.report import write_report
from cosmos_rl.utils.logging import logger, warn_of_all

HOOKS = (
    "pre_validation_hook",
    "pre_per_step_validation_hook",
    "post_per_step_validation_hook",
    "post_validation_hook",
    "save_checkpoint_hook",
    "load_checkpoint_hook",
)
EXIT_CODES = {"SIGTERM": 75, "SIGUSR1": 75, "SIGHUP": 75, "SIGINT": 130}
_REFUSED = {
    Refusal.NOT_FINITE: "loss or gradient is not finite and is not applied",
    Refusal.ZERO: "the gradient is zero everywhere although the losses differ, and is not applied",
}


class TrainLoop:
    """Drives one task from its first (or resumed) step to its end."""

    def __init__(
        self,
        config: Config,
        run: RunFolder,
        context: Context,
        task: Task,
        custom_loggers: Sequence[LoggerFn],
        hooks: Mapping[str, HookFn],
        stop: StopRequest,
        display: LiveDisplay | None = None,
    ) -> None:
        self._config = config
        self._run = run
        self._context = context
        self._task = task
        self._custom_loggers = custom_loggers
        self._hooks = hooks
        self._stop = stop
        self._display = display or LiveDisplay()
        self._metrics: MetricsFile | None = None
        if context.is_main:
            self._metrics = MetricsFile(run.metrics)
        self._trackers: list[MetricLogger] = []
        ckpt = config.train.ckpt
        self._manager = CheckpointManager(
            run.checkpoints,
            run.safetensors,
            background=ckpt.save_mode == "async",
            max_keep=ckpt.max_keep,
            is_main=context.is_main,
        )
        self._same = same_run.collect_fixed_settings(config, context, task.fingerprint())
        compare_fingerprints(self._same, context)
        self._settings = same_run.collect_settings(config, task.total_steps)
        self._saved_step: int | None = None
        # (step, objective) of the last validation that reported one, and of the best saved step
        self._last_objective: tuple[int, float] | None = None
        self._best: tuple[int, float] | None = None
        self._skipped_in_a_row = 0
        unknown = sorted(set(hooks) - set(HOOKS))
        if unknown:
            raise UserError(f"hook_fns: unknown hooks {', '.join(unknown)}; known are {', '.join(HOOKS)}")
        require_installed(config.logging.logger)  # on all ranks: one that is refused alone leaves the others waiting
        if ckpt.upload_hf:
            hub.require_token(ckpt.hf_repo_name or "")

    def run(self, resume_from: Path | None) -> int:
        """Train to the end or to a stop request; the exit code."""
        with contextlib.ExitStack() as stack:  # every part is ended, whatever the others meet
            stack.callback(self._manager.close)
            start = self._restore(resume_from)
            if self._context.is_main:
                begin_run(self._run)
                self._trackers = start_loggers(self._config, self._run, start, self._custom_loggers)
            for tracker in self._trackers:
                stack.callback(tracker.finish)
            return self._train(start, stack.enter_context(self._record_profile(start)))

    def _train(self, start: int, end_of_step: Callable[[], None]) -> int:
        task, total = self._task, self._task.total_steps
        console = Console(total, start, self._display)
        with enter_phase("preparing"):
            task.start(start)
        if start == 0 and self._config.validation.enable and self._config.validation.val_before_train:
            self._log(0, self._validate(0))
        step = start
        while step < total:
            began = time.perf_counter()
            with memory_phase("training"):
                report = task.train_step(step)
            done = step + 1
            self._guard(done, report.refusal)
            metrics = {"time/iteration": time.perf_counter() - began, **report.metrics}
            if self._validation_due(done):
                metrics |= self._validate(done)
            self._log(done, metrics)
            self._show(done, "rollout", "rollout_images", report.gallery)
            if report.alarm is not None:
                self._display.show_alarm(report.alarm.text)
            console.show(done, metrics)
            if self._line_due(done, start):
                console.log(done, metrics)
            if report.alarm is not None and report.alarm.action != "warn":
                step = self._rewind(done, report.alarm)
                continue
            if report.alarm is not None:
                warn_of_all(report.alarm.text)
            if self._save_due(done):
                self._save(done)
            end_of_step()
            signal_name = self._stop_signal()
            if signal_name and done < total:
                return self._end_early(done, signal_name)
            step = done
        self._finish(total, trained=start < total)
        return 0

    def _rewind(self, done: int, alarm: Alarm) -> int:
        """Restore the newest whole checkpoint that the alarm calls good; the step to continue from.

        Raises:
            TrainingStoppedError: the alarm asks to stop, or there is no such checkpoint; what there is, is saved.
        """
        self._manager.wait()
        # only the main rank has waited until the last one was whole
        saved: list[int] = []
        if self._context.is_main:
            saved = list_whole_steps(self._run.checkpoints)
        newest = max((step for step in saved if step <= alarm.good_step), default=0)
        good = int(self._context.max_over_ranks([float(newest)])[0])
        if alarm.action == "stop" or good == 0:
            self._save(done, final=True)
            self._manager.wait()
            if self._context.is_main:
                self._report()
            kept = "There is no checkpoint up to it."
            if alarm.action == "rewind":
                kept = "There is no checkpoint up to it to go back to (train.ckpt.save_freq)."
            if good:
                kept = f"The newest checkpoint up to it is step {good}."
            raise TrainingStoppedError(
                f"stopped by the guard against reward hacking at {alarm.text}\n  No alarm up to step "
                f"{alarm.good_step}. {kept} Step {done} is saved as it is. A larger train.train_policy.kl_beta or a "
                f"lower train.optm_lr make this rarer; {alarm.other_actions}"
            )
        warn_of_all(f"{alarm.text}\n  Rewinding to step {good}")
        self._manager.remove_steps_after(good)
        if self._best is not None and self._best[0] > good:
            self._best = None
        step = self._restore(policy_dir(self._run.checkpoints, good).absolute())
        self._task.on_rewind(step, alarm.rewinds)
        self._task.start(step)
        return step

    def _stop_signal(self) -> str | None:
        """The signal that asked any rank to stop; the same answer on all ranks."""
        names = ["", *EXIT_CODES]
        (number,) = self._context.max_over_ranks([names.index(self._stop.requested or "")])
        return names[int(number)] or None

    def _guard(self, done: int, refusal: Refusal | None) -> None:
        """Count the steps in a row that were not applied; too many of them end the run.

        Raises:
            FloatingPointError: as many as ``train.max_nonfinite_steps``.
        """
        if refusal is Refusal.OVERFLOW:  # it ends by itself: the loss scale is lowered each time, a few times at most
            logger.info(f"Step {done}: a float16 gradient overflowed and is not applied; the loss scale is lowered")
            return
        if refusal is None:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        limit, count = self._config.train.max_nonfinite_steps, self._skipped_in_a_row
        warn_of_all(f"Step {done}: {_REFUSED[refusal]} ({count} steps in a row)")
        if count < limit:
            return
        if refusal is Refusal.ZERO:
            raise FloatingPointError(
                f"the gradient was zero everywhere in {limit} steps in a row (train.max_nonfinite_steps), the last is "
                f"step {done}, although the losses differ: it is too small for its type. Use train.param_dtype and "
                'train.fsdp_reduce_dtype "bfloat16" or "float32", and see that the trained weights reach the output.'
            )
        raise FloatingPointError(
            f"loss or gradient was not finite in {limit} steps in a row (train.max_nonfinite_steps), the last is "
            f"step {done}; what is not finite was never applied, so the weights are finite. Lower train.optm_lr or "
            "train.optm_grad_norm_clip, or look at the data of these steps."
        )

    # ---- saving ------------------------------------------------------------------------------------------------

    def _save_due(self, done: int) -> bool:
        ckpt, epochs = self._config.train.ckpt, self._config.train.ckpt.save_freq_in_epoch
        if epochs > 0:
            due = self._task.epoch(done) // epochs > self._task.epoch(done - 1) // epochs
        else:
            due = done % ckpt.save_freq == 0
        return ckpt.enable_checkpoint and (due or done == self._task.total_steps)

    @memory_phase("saving")
    def _save(self, done: int, *, final: bool = False) -> None:
        """Save step ``done``; its export too when the configuration or the end of the run asks for it."""
        ckpt = self._config.train.ckpt
        last = done == self._task.total_steps
        self._manager.wait()  # first, so that the copies of two exports are never there at once
        export = None
        if ckpt.export_safetensors or last:
            export = self._prepare_export_of(done)
        optimizer = self._task.optimizer
        averages = {AVERAGE: optimizer.averages_of(self._task.params)}
        state = collect(self._task.params, optimizer.torch_optimizer, {**self._extra_tensors(), **averages})
        is_best = self._is_best(done)
        own = {"skipped_in_a_row": self._skipped_in_a_row, "best": self._best}
        kept = {"step": done, "run": self._same, "loop": own, "task": self._task.state_dict()}
        kept["settings"] = self._settings
        job = SaveJob(done, state, kept, export, best=is_best)
        self._manager.save(job, block=final)
        self._saved_step = done
        where = {"checkpoint_path": str(policy_dir(self._run.checkpoints, done)), "step": done}
        self._notify("save_checkpoint_hook", {**where, "total_steps": self._task.total_steps}, owner=self._manager)

    def _is_best(self, done: int) -> bool:
        """Whether ``done``, which is being saved, was validated and has the lowest objective of all saved steps."""
        if self._last_objective is None:
            return False
        step, objective = self._last_objective
        if step != done or not math.isfinite(objective):
            return False
        if self._best is not None and objective >= self._best[1]:
            return False
        self._best = self._last_objective
        return True

    def _prepare_export_of(self, done: int) -> WriteExport:
        """Copies the weights now; writes them when called."""
        write, folder = self._task.prepare_export(), step_dir(self._run.safetensors, done)
        return lambda: write(folder) if self._context.is_main else None

    def _end_early(self, done: int, signal_name: str) -> int:
        """Save, also where checkpoints are off: a stopped run loses nothing."""
        warn_of_all(f"{signal_name}: saving step {done} and stopping")
        if self._saved_step != done:
            self._save(done, final=True)
        self._manager.wait()
        logger.info(f"Stopped after step {done}; continue with the same command and --train.resume=true")
        return EXIT_CODES[signal_name]

    @memory_phase("saving")
    def _finish(self, total: int, *, trained: bool) -> None:
        """The export of the last step always exists at the end, also without checkpoints."""
        self._manager.wait()
        folder = step_dir(self._run.safetensors, total)
        if not trained:
            logger.info(f"Nothing left to train: step {total} of {total} is done already")
        (missing,) = self._context.max_over_ranks([float(self._context.is_main and not folder.exists())])
        if missing:
            self._manager.save(SaveJob(total, None, {}, self._prepare_export_of(total), best=self._is_best(total)))
        self._manager.wait()
        train = self._config.train
        limit = "epoch"
        if train.max_num_steps == total:
            limit = "max_num_steps"
        logger.info(
            f"Finished after {total} steps (train.{limit} = {getattr(train, limit)}). Result: {folder.absolute()}"
        )
        if self._context.is_main:
            self._publish(folder, total)

    def _publish(self, folder: Path, step: int) -> None:
        """Describe export and run, and upload the export if wanted. Other ranks do not wait for the network."""
        export = folder
        if (folder / "lora").is_dir():
            export = folder / "lora"
        policy = self._config.policy
        base = find_folder(policy.model_name_or_path, policy.model_revision)
        guardrail = base is not None and "safety_checker" in find_absent(base)
        describe = functools.partial(write_card, export, self._config, self._run.media, step=step, guardrail=guardrail)
        describe()
        self._report()
        ckpt = self._config.train.ckpt
        if ckpt.upload_hf:
            with enter_phase("uploading"):
                hub.upload(export, ckpt.hf_repo_name or "", self._run.name, lambda name: describe(repository=name))

    def _report(self) -> None:
        """Everything is saved by now: a page that cannot be made does not fail the run."""
        try:
            logger.info(f"Look at the run: {write_report(self._run.root)}")
        except Exception:
            logger.exception(f"{self._run.root}: the report could not be made; cosmos-rl report tries again")

    @memory_phase("loading")
    def _restore(self, resume_from: Path | None) -> int:
        """Load a checkpoint; the 0-based next step. All ranks take rank 0's: a shared disk may lag behind."""
        agreed = self._context.broadcast_from_main(str(resume_from or ""))
        resume_from = Path(agreed) if agreed else None
        if resume_from is None:
            self._truncate_metrics(-1)
            return 0
        state = read_trainer_state(resume_from)
        step = int(state["step"])
        if step > self._task.total_steps:
            raise UserError(
                f"{resume_from} is step {step}, but this run ends after {self._task.total_steps} steps (train.epoch, "
                "train.max_num_steps); raise them or resume an earlier step"
            )
        same_run.compare(resume_from, state["run"], self._same)
        if self._context.is_main:
            same_run.log_changes(state.get("settings", {}), self._settings)
        restore(resume_from, self._task.params, self._task.optimizer.torch_optimizer, self._extra_tensors())
        try:
            self._task.load_state_dict(state["task"])
        except KeyError as error:
            raise UserError(
                f"{resume_from} was saved by another version of cosmos-rl (it has no {error}), which must resume it; "
                "or start a new run from the newest export"
            ) from None
        self._skipped_in_a_row = int(state["loop"]["skipped_in_a_row"])
        best = state["loop"].get("best")
        if best is not None and self._manager.link_best(int(best[0])):  # a step of another run is nobody's best here
            self._best = (int(best[0]), float(best[1]))
        self._truncate_metrics(step)
        self._saved_step = step if resume_from == policy_dir(self._run.checkpoints, step).absolute() else None
        logger.info(f"Resumed from {resume_from}: continuing after step {step} of {self._task.total_steps}")
        data = {"checkpoint_path": str(resume_from), "extra_vars": state}
        self._notify("load_checkpoint_hook", data, owner=self._manager)
        return step

    def _truncate_metrics(self, step: int) -> None:
        if self._metrics is not None:
            self._metrics.rewind(step)

    def _extra_tensors(self) -> Mapping[str, Mapping[str, Any]]:
        """Named tensors other than the trained weights: the EMA's and the task's own."""
        ema = self._task.ema
        tensors: dict[str, Mapping[str, Any]] = {}
        if ema is not None:
            tensors["ema"] = ema.shadow
        return tensors | dict(self._task.extra_tensors())

    # ---- validation and logging --------------------------------------------------------------------------------

    def _validation_due(self, done: int) -> bool:
        validation = self._config.validation
        return validation.enable and (done % validation.freq == 0 or done == self._task.total_steps)

    @memory_phase("validating")
    def _validate(self, done: int) -> dict[str, float]:
        began = time.perf_counter()
        about = {"current_epoch": self._task.epoch(done)}
        self._notify("pre_validation_hook", {**about, "is_last_step": done == self._task.total_steps})
        report = self._task.validate(done, lambda name, data: self._notify(name, {**about, **data}))
        self._show(done, "validation", "val/images", report.images)
        metrics = {**report.metrics, **self._report_broken_images(done, report.images)}
        if report.objective is not None:
            self._last_objective = (done, report.objective)
        self._notify("post_validation_hook", {**about, "val_avg_loss": report.loss})
        return {**metrics, "time/validation": time.perf_counter() - began}

    def _report_broken_images(self, done: int, images: Sequence[Shown]) -> dict[str, float]:
        """How many validation images show nothing or are not finite; they are named once, on the main rank."""
        if not images:
            return {}
        broken = [one for one in images if not one.finite]
        empty = [one for one in images if one.blank and one.finite]
        for wrong, what in ((broken, "have pixels that are not finite"), (empty, "have one colour only")):
            if wrong and self._context.is_main:
                first = ", ".join(repr(one.prompt[:40]) for one in wrong[:3])
                logger.warning(f"Step {done}: {len(wrong)} of {len(images)} validation images {what}, as for {first}")
        return {"val/empty_images": float(len(empty)), "val/nonfinite_images": float(len(broken))}

    def _show(self, done: int, kind: str, name: str, gallery: Sequence[Shown]) -> None:
        """Write a gallery, each rank what it made, and give it to the trackers."""
        if not gallery:
            return
        files = save_gallery(self._run.media / kind / f"step_{done}", gallery, context=self._context)
        for tracker in self._trackers:  # on the main rank alone
            tracker.log_images(done, name, files, list(map(build_caption, gallery)))

    def _log(self, done: int, metrics: Mapping[str, float]) -> None:
        if self._metrics is not None:
            self._metrics.log(done, metrics)
        for tracker in self._trackers:
            tracker.log(done, metrics)

    def _line_due(self, done: int, start: int) -> bool:
        """The first, the last and every ``log_interval``-th step get a line on the console."""
        table = self._config.logging
        due = done % table.log_interval == 0 or done in (start + 1, self._task.total_steps)
        return due and self._context.is_main and "console" in table.logger

    def _record_profile(self, start: int) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """Around the steps; what it yields is called after each."""
        if not self._config.profiler.enable_profiler:
            return contextlib.nullcontext(lambda: None)
        from cosmos_rl.policy.trainer.profiling import record_profile

        return record_profile(self._config.profiler, self._run.root / "profile", self._context, start)

    def _notify(self, name: str, data: dict[str, Any], owner: Any = None) -> None:
        """Call the user's hook: ``fn(loop or checkpoint manager, data)``."""
        if name in self._hooks:
            self._hooks[name](owner or self, data)
