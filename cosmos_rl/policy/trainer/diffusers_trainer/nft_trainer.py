"""DiffusionNFT (Zheng et al. 2025, arXiv 2509.16117). One step: sample a group for each prompt with the old policy,
score the samples, turn scores into r in [0, 1], and regress the trained velocity towards what good samples say and away
from what bad ones say. See docs/algorithms/nft.md."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.algorithms.decay import old_policy_decay
from cosmos_rl.data.prompts import PromptRecord, prompts_digest
from cosmos_rl.data.streams import MapStream
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.distributed.memory import memory_phase
from cosmos_rl.errors import TrainingStoppedError
from cosmos_rl.optim.ema import Ema
from cosmos_rl.optim.optimizer import Refusal, StepResult, foremost
from cosmos_rl.policy.config import Config, GrpoPolicyConfig, rollout_chunk, validation_chunk
from cosmos_rl.policy.model.diffusers.velocity_model import VelocityModel
from cosmos_rl.policy.trainer.diffusers_trainer import nft_update, scoring
from cosmos_rl.policy.trainer.diffusers_trainer.common import build_ema, build_optimizer
from cosmos_rl.policy.trainer.diffusers_trainer.dealing import optimizer_batches, over_ranks, share
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import PromptConditions
from cosmos_rl.policy.trainer.diffusers_trainer.scoring import Scored
from cosmos_rl.policy.trainer.diffusers_trainer.watch import HeldOut, Watch, digest_of
from cosmos_rl.policy.trainer.task import Alarm, Notify, StepReport, ValidationReport
from cosmos_rl.reward.table import Rewards, RewardTable
from cosmos_rl.rollout.sampler import Rollouts, RolloutSampler, RolloutSpec, Slot, diversity, fixed, grouped, joined
from cosmos_rl.tracking.media import Shown
from cosmos_rl.utils.logging import logger


class NFTTrainer:
    """The DiffusionNFT task."""

    def __init__(
        self,
        config: Config,
        context: Context,
        *,
        model: VelocityModel,
        prompts: Sequence[PromptRecord],
        rewards: Rewards,
        conditions: PromptConditions,
        val_prompts: Sequence[PromptRecord] = (),
        val_rewards: Rewards | None = None,
        held_out: HeldOut | None = None,
        data_loss: Callable[[int, int], Iterator[Tensor]] | None = None,
        export: Callable[[], Callable[[Path], None]] | None = None,
    ) -> None:
        """Everything that a step needs, already loaded.

        Args:
            model: what is trained.
            prompts: the prompt set.
            rewards: scores of training samples.
            conditions: prompts -> conditions of ``model``.
            val_prompts, val_rewards: of validation.
            held_out: samples for the watch; None: samples of the model at the start.
            data_loss: (step, number of the optimiser step) -> this rank's shares of the mean loss of real samples.
            export: copies the weights as they are now; its result writes them into a step's folder. None: no export.

        Raises:
            UserError: prompts and batch do not fit.
        """
        job = config.train.train_policy
        assert isinstance(job, GrpoPolicyConfig)
        self._config, self._job, self._context = config, job, context
        self._seed = config.train.seed
        self.model = model
        self._prompts, self._val_prompts = prompts, val_prompts
        self._prompts_digest = prompts_digest(prompts)  # every save asks for it
        self._rewards, self._val_rewards = rewards, val_rewards or rewards
        self._conditions = conditions
        self._data_loss, self._export = data_loss, export
        self.samples_per_step = config.train.global_batch_size or config.train.train_batch_per_replica
        self._group = config.rollout.n_generation
        per_step = self.samples_per_step // self._group
        self.stream = MapStream(
            len(prompts),
            per_step,
            job.dataloader_seed,
            job.dataloader_shuffle,
            drop_last=job.dataloader_drop_last and len(prompts) >= per_step,
        )
        self.total_steps = self.stream.steps_per_epoch * config.train.epoch
        if config.train.max_num_steps is not None:
            self.total_steps = min(self.total_steps, config.train.max_num_steps)
        self.params: Mapping[str, torch.nn.Parameter] = model.trainable()
        self.policies = model.policies(keep_old=self._keeps_old(), keep_reference=job.kl_beta > 0.0)
        self.optimizer = build_optimizer(self.params, config.train, self.total_steps)
        self.ema: Ema | None = build_ema(self.params, config.train)
        diffusers = config.policy.diffusers
        self._sampler = RolloutSampler(model, RolloutSpec.training(diffusers), conditions, self._seed)
        self._evaluator = RolloutSampler(model, RolloutSpec.evaluation(diffusers), conditions, self._seed)
        self._levels = model.sampling_levels(diffusers.sample.num_steps)[:-1]
        settings = nft_update.NftSettings(diffusers.nft_beta, job.kl_beta, job.advantage_high)
        self._update = nft_update.NftUpdate(model, self.policies, settings, job.mini_batch)
        self._chunk = rollout_chunk(config)
        self.watch = Watch(
            job.watch,
            model,
            context,
            conditions,
            sampler=self._sampler,
            evaluator=self._evaluator,
            prompts=prompts,
            seed=self._seed,
            chunk=job.mini_batch,
            rollout_chunk=self._chunk,
            latent_shape=model.latent_shape(*diffusers.inference_size),
        )
        self._held_out = held_out
        self._optimizer_steps = 0  # those that were applied: what EMA and old policy count
        self._evaluations = 0  # of all ranks, before this process was started or at the last step
        self._levels_per_sample = diffusers.trained_levels
        self._rewinds = 0
        self._last_good = 0  # the last step at which the watch found nothing wrong
        self._missing_warned = self._equal_warned = False
        self._describe()

    def _keeps_old(self) -> bool:
        """Whether the old policy ever differs from the trained one while it is used."""
        job = self._job
        local = self.samples_per_step // self._context.dp_size
        one_step = job.mu_iterations == 1 and (job.batch_size_per_optimize or local) >= local
        return self._config.policy.diffusers.weight_copy_decay_type != 0 or not one_step

    # ---- the task ----------------------------------------------------------------------------------------------

    def start(self, step: int) -> None:
        """Let the watch measure the start: before the first step, or where a checkpoint knows nothing of it."""
        if self._job.watch.enable:
            self.watch.begin(step, self._held_out)

    def train_step(self, step: int) -> StepReport:
        """Roll out, score, learn."""
        self._conditions.forget()
        began = time.perf_counter()
        own, futures = self._roll_out(step)
        rolled = time.perf_counter()
        tables = [self._scores(future) for future in futures]
        judged = time.perf_counter()
        scored = self._judged(step, own, tables)
        terms, refusal = self._learn(step, scored)
        learnt = time.perf_counter()
        (spread,) = self._context.sum_over_ranks([diversity(own.media, [slot.group for slot in own.slots])])
        metrics = {
            **scoring.reward_metrics(scored),
            **terms,
            "train/learning_rate": self.optimizer.learning_rate(step),
            "train/optimizer_steps": float(self._optimizer_steps),
            "train/epoch": float(self.epoch(step)),
            "rollout/diversity": spread / self._context.dp_size,
            "time/rollout": rolled - began,
            "time/reward_wait": judged - rolled,
            "time/update": learnt - judged,
        }
        done, alarm = step + 1, None
        if self.watch.due(done):
            measured, wrong = self.watch.look()
            metrics |= {**measured, "watch/alarms": float(len(wrong)), "watch/rewinds": float(self._rewinds)}
            alarm = self._alarm(done, wrong)
        metrics["train/network_evaluations"] = self._count_evaluations()
        due = scoring.gallery_due(done, self.total_steps, self._config.logging.multi_modal_log_interval)
        shown = scoring.gallery(scored, self._context) if due else ()
        return StepReport(metrics, refusal, gallery=shown, alarm=alarm)

    def validate(self, step: int, notify: Notify) -> ValidationReport:
        """Samples of the validation prompts with the averaged weights, scored; changes no trained tensor."""
        if not self._val_prompts:
            return ValidationReport()
        config, names = self._config, self._val_rewards.names
        slots = fixed(self._val_prompts, config.validation.n_generation)
        size = validation_chunk(config, len(self._val_prompts))
        own = slots[self._context.dp_rank :: self._context.dp_size]
        self._conditions.prepare([slot.prompt for slot in own])
        swap: AbstractContextManager[None] = self.ema.swapped_in() if self.ema is not None else nullcontext()
        with swap, self.policies.using("default"), self.model.evaluating():

            def made(ids: Sequence[int], number: int) -> tuple[Tensor, Tensor]:
                notify("pre_per_step_validation_hook", {"batch_index": number})
                sampled = self._evaluator.sample([slots[i] for i in ids], "validation/rollout", 0)
                table = self._scores(self._val_rewards.submit(scoring.request_of(sampled)))
                about = {"batch_index": number, "val_score": scoring.mean(table.total_N)}
                notify("post_per_step_validation_hook", about)
                return sampled.media, scoring.columns(table, names)

            media, reward = over_ranks(len(slots), size, self._context, made)
        self._conditions.forget()
        self._count_evaluations()  # here, so that a checkpoint of this step holds them
        return self._validated(step, slots, media, reward)

    def _validated(self, step: int, slots: Sequence[Slot], media: Tensor, reward: Tensor) -> ValidationReport:
        names = list(self._val_rewards.names)
        metrics = scoring.validation_metrics(reward, names)
        self._note_untrained(step, reward)
        shown = [
            Shown(media[i], slot.prompt, slot.sample_id, "fixed", scoring.score_dict(reward[i], names))
            for i, slot in enumerate(slots)
        ]
        objective = -metrics["val/reward_avg"]
        return ValidationReport(metrics, shown if media.dtype == torch.uint8 else (), objective=objective)

    def _note_untrained(self, step: int, reward: Tensor) -> None:
        """Show the watch the scores of a validation that training does not use."""
        places = [i for i, name in enumerate(self._val_rewards.names) if not self._rewards.weights.get(name)]
        if not places:
            return
        names = [self._val_rewards.names[i] for i in places]
        made = (self._seed, self._evaluator.spec, self._config.validation.n_generation)
        of = digest_of(*made, prompts_digest(self._val_prompts), *(self._val_rewards.origins[name] for name in names))
        scores = {name: reward[:, 1 + i] for name, i in zip(names, places, strict=True)}
        self._last_good = min(self._last_good, self.watch.untrained.note(step, scores, of))

    def epoch(self, step: int) -> int:
        """In which 0-based pass over the prompts the run is after ``step`` steps."""
        return step // self.stream.steps_per_epoch

    def prepare_export(self) -> Callable[[Path], None]:
        """Copy the weights to export (EMA if kept) in ``train.param_dtype``."""
        with self.ema.swapped_in() if self.ema is not None else nullcontext():
            return self._export() if self._export is not None else lambda folder: None

    def copies(self) -> Mapping[str, Mapping[str, Tensor]]:
        """What must survive a restart beside weights, moments and EMA."""
        found = {"old": self.policies.old_state(), "reference": self.policies.reference_state()}
        if self._job.watch.enable and self._held_out is None:
            found["watch"] = {"latents": self.watch.held_out.latents}
        return found

    def close(self) -> None:
        """End what scores samples."""
        self._rewards.close()
        if self._val_rewards is not self._rewards:
            self._val_rewards.close()

    def identity(self) -> dict[str, Any]:
        """What the positions in the prompts and the draws depend on."""
        return {
            "seed": self._seed,
            "samples_per_step": self.samples_per_step,
            "n_generation": self._group,
            "prompts": f"{self.stream.length} ({self._prompts_digest})",
            "dataloader_seed": self._job.dataloader_seed,
            "dataloader_shuffle": self._job.dataloader_shuffle,
        }

    def progress(self) -> dict[str, Any]:
        """Counters that a resumed run goes on from."""
        return {
            "optimizer_steps": self._optimizer_steps,
            "loss_scale": self.optimizer.progress(),
            "evaluations": self._evaluations,
            "rewinds": self._rewinds,
            "last_good": self._last_good,
            "old_is_default": self.policies.old_is_default,
            "watch": self.watch.progress(),
            "rewards": {
                name: [self._rewards.weights[name], self._rewards.origins[name]] for name in self._rewards.names
            },
        }

    def restore_progress(self, progress: Mapping[str, Any]) -> None:
        """Take over the counters of a checkpoint."""
        self._optimizer_steps = int(progress["optimizer_steps"])
        self.optimizer.restore_progress(progress.get("loss_scale"))
        self._evaluations = int(progress["evaluations"])
        self._set_rewinds(int(progress["rewinds"]))
        self._last_good = int(progress["last_good"])
        self.policies.old_is_default = bool(progress["old_is_default"])
        self.watch.restore_progress(progress["watch"])
        before, now = progress["rewards"], self.progress()["rewards"]
        changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
        if changed:
            logger.warning(
                "the rewards are not those of the run that is resumed (%s: other function or weight, new, or gone); "
                "scores before and after do not compare",
                ", ".join(changed),
            )

    # ---- rollout and rewards -----------------------------------------------------------------------------------

    def _purpose(self, name: str) -> str:
        """Purposes of random draws change when the run goes back, so that it takes another way."""
        return f"{name}/{self._rewinds}" if self._rewinds else name

    def _scores(self, future: "Future[RewardTable]") -> RewardTable:
        """The scores of one chunk. The rewards keep deadlines of their own; this one is for when they do not."""
        job, calls = self._job, self._chunk * max(len(self._rewards.names), 1)
        seconds = calls * job.local_reward.timeout_s + 2.0 * job.remote_reward.timeout_s + 60.0
        if not wait([future], seconds).done:
            raise TrainingStoppedError(
                f"the rewards {', '.join(self._rewards.names)} of {self._chunk} samples are not there after "
                f"{seconds:g} s (the sum of what timeout_s in train.train_policy.local_reward and remote_reward allow)"
            )
        return future.result()

    def _slots(self, step: int) -> list[Slot]:
        """All samples of a step: prompts x samples, a contiguous block for each rank."""
        return grouped(((p.sample_id, self._prompts[p.index]) for p in self.stream.positions(step)), self._group)

    @memory_phase("sampling")
    def _roll_out(self, step: int) -> tuple[Rollouts, list["Future[RewardTable]"]]:
        """Sample with the old policy; each chunk is being scored while the next one is sampled."""
        local = self.samples_per_step // self._context.dp_size
        slots = self._slots(step)[self._context.dp_rank * local :][:local]
        parts, futures = [], []
        self._conditions.prepare([slot.prompt for slot in slots])
        with self.policies.using("old"), self.model.evaluating():
            for first in range(0, len(slots), self._chunk):
                parts.append(self._sampler.sample(slots[first : first + self._chunk], self._purpose("rollout"), step))
                futures.append(self._rewards.submit(scoring.request_of(parts[-1])))
        return joined(parts), futures

    def _judged(self, step: int, own: Rollouts, tables: Sequence[RewardTable]) -> Scored:
        """The rewards of all ranks and their advantages."""
        scored = scoring.scored(
            self._slots(step),
            own,
            tables,
            rewards=self._rewards,
            job=self._job,
            global_std=self._config.policy.diffusers.sample.global_std,
            context=self._context,
        )
        reasons = scoring.missing_reasons(own, tables)
        if reasons and not self._missing_warned:
            logger.warning("rewards are missing; the samples are left out and counted:\n  " + "\n  ".join(reasons[:5]))
            self._missing_warned = True
        if not self._equal_warned and not self._job.bypass_reward and scoring.teaches_nothing(scored):
            logger.warning(
                f"step {step + 1}: the samples of each prompt all have the same reward, so nothing can be learnt from "
                "them; cosmos-rl doctor --config examines the rewards"
            )
            self._equal_warned = True
        return scored

    # ---- learning ----------------------------------------------------------------------------------------------

    def _learn(self, step: int, scored: Scored) -> tuple[dict[str, float], Refusal | None]:
        """All optimiser steps of this training step, then the old policy follows; (metrics, what was refused)."""
        job, ranks = self._job, self._context.dp_size
        size = job.batch_size_per_optimize
        batches = optimizer_batches(
            torch.nonzero(scored.kept_N).flatten().tolist(),
            size=None if size is None else size * ranks,
            passes=job.mu_iterations,
            seed=self._seed,
            purpose=self._purpose("nft"),
            step=step,
        )
        latents = scoring.latents_by_place(scored, batches, self._context)
        total, results = nft_update.TermSums(), []
        self.model.transformer.train()
        for number, ids in enumerate(batches):
            result, terms = self._optimizer_step(step, number, ids, latents, scored)
            results.append(result)
            total.merge(terms)
        if any(result.applied for result in results):
            kind = self._config.policy.diffusers.weight_copy_decay_type
            self.policies.follow(old_policy_decay(kind, self._optimizer_steps))
        norms = [result.grad_norm for result in results]
        metrics = {
            **total.metrics(self._context, self._loss_weights),
            "train/grad_norm": sum(norms) / max(len(norms), 1),
            "optimizer/zero_gradients": float(sum(result.refusal is Refusal.ZERO for result in results)),
            **self.optimizer.metrics(),
        }
        return metrics, foremost(results)

    def _optimizer_step(
        self, step: int, number: int, places: Sequence[int], latents: Mapping[int, Tensor], scored: Scored
    ) -> tuple[StepResult, nft_update.TermSums]:
        """The gradient of the samples at ``places`` of the step, over all ranks, and one step along it."""
        context = self._context
        own = share(places, context.dp_rank, context.dp_size)
        r_N = scored.optimality(self._job).float()
        rows = nft_update.drawn_rows(
            [scored.slots[place] for place in own.ids],
            torch.stack([latents[place] for place in own.ids]),
            r_N[list(own.ids)],
            torch.tensor(own.weights),
            levels=self._levels,
            count=self._levels_per_sample,
            key=(self._seed, self._purpose(f"nft/{number}"), step),
        )
        row_cond = self._conditions.places(rows.prompts)
        torch.manual_seed(randomness.torch_seed(self._seed, self._purpose("dropout"), step, number, context.dp_rank))
        total_weight = float(len(places) * self._levels_per_sample)
        data_share = self._data_term(step, number, total_weight)
        terms = self._update.accumulate(
            rows,
            self._conditions.all(),
            row_cond=row_cond,
            loss_factor=self.optimizer.loss_factor,
            noise_key=(self._seed, self._purpose(f"nft/noise/{number}"), step),
            old_is_current=self.policies.old_is_default and not self.model.has_dropout(),
            kl_beta=self._kl_beta,
        )
        if terms.broken:
            logger.warning(f"step {step + 1}: the loss is not finite, first for {'; '.join(terms.broken)}")
        if data_share is not None:
            terms.sums["data_loss"] = data_share * total_weight  # like the other sums: over all ranks' rows
        parts = context.sum_over_ranks([terms.sums.get(name, 0.0) for name in self._loss_weights])
        loss = sum(weight * part for weight, part in zip(self._loss_weights.values(), parts, strict=True))
        # sharded gradients are averaged over the ranks; what is wanted is their sum over the weight of the whole step
        result = self.optimizer.step(
            step,
            scale=context.dp_size / total_weight,
            loss=loss / total_weight,
            expects_gradient=parts[-1] > 0.0 or bool((r_N[list(places)] != 0.5).any()),
        )
        if result.applied:
            self.policies.old_is_default = False
            if self.ema is not None:
                self.ema.update(self._optimizer_steps)
            self._optimizer_steps += 1
        return result, terms

    def _data_term(self, step: int, number: int, total_weight: float) -> float | None:
        """Add ``total_weight`` times the gradient of real samples; this rank's share of their mean loss."""
        beta = self._job.data_term.beta
        if self._data_loss is None or beta == 0.0:
            return None
        self.model.synchronise_gradients(False)
        factor = beta * total_weight * self.optimizer.loss_factor
        return sum(nft_update.add_gradient(loss, factor) for loss in self._data_loss(step, number))

    # ---- what is told ------------------------------------------------------------------------------------------

    def _count_evaluations(self) -> float:
        """Network evaluations of all ranks since the start of the run; a backward pass counts as two. All ranks must
        call it."""
        (count,) = self._context.sum_over_ranks([float(self.model.evaluations)])
        self.model.evaluations = 0
        self._evaluations += int(count)
        return float(self._evaluations)

    # ---- going back --------------------------------------------------------------------------------------------

    @property
    def _kl_beta(self) -> float:
        return self._job.kl_beta * self._job.watch.rewind_kl_factor**self._rewinds

    @property
    def _loss_weights(self) -> dict[str, float]:
        """The parts of the loss by their names among the terms."""
        return {"policy_loss": 1.0, "kl_loss": self._kl_beta, "data_loss": self._job.data_term.beta}

    def _set_rewinds(self, count: int) -> None:
        """Learning rate, KL weight and the random draws depend on how often the run went back."""
        self._rewinds = count
        self.optimizer.lr_factor = self._job.watch.rewind_lr_factor**count

    def _alarm(self, done: int, wrong: Sequence[str]) -> Alarm | None:
        """What the loop is to do about it."""
        watch, good = self._job.watch, self._last_good
        if not wrong:
            self._last_good = done
            return None
        text = f"step {done}: " + "; ".join(wrong)
        action, count = watch.action, self._rewinds + 1
        if action == "rewind" and count > watch.max_rewinds:
            action, text = "stop", f"{text}. The run went back {self._rewinds} times already (watch.max_rewinds)"
        return Alarm(text, action, good, lambda step: self._gone_back(step, count))

    def _gone_back(self, step: int, count: int) -> None:
        """The run goes on after ``step``, at which nothing was wrong, for the ``count``-th time."""
        self._set_rewinds(count)
        self._last_good = step

    def _describe(self) -> None:
        count = sum(p.numel() for p in self.params.values())
        what = "LoRA adapter" if self.model.lora_config is not None else "whole transformer"
        logger.info(
            f"DiffusionNFT on the {what}: {count:,} parameters on {self._context.device}; {self.stream.length} "
            f"prompts, {self.stream.batch} per step x {self._group} samples = {self.samples_per_step}, "
            f"{self._levels_per_sample} of {len(self._levels)} noise levels each, rewards "
            f"{', '.join(self._rewards.names)}; {self.total_steps} steps"
        )
