"""Online reinforcement learning of a flow model. One step: sample a group for each prompt, score the samples, turn the
scores into advantages, learn from them. What is learnt, and from which policy's samples, is the algorithm's answer."""

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.data.prompts import PromptRecord, digest_prompts
from cosmos_rl.data.set_stream import interleave_sets
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.distributed.memory import memory_phase
from cosmos_rl.distributed.phase import count_parts, enter_phase
from cosmos_rl.errors import UserError
from cosmos_rl.optim.optimizer import Refusal, StepResult, most_serious_refusal
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.jobs import online_table
from cosmos_rl.policy.config.plan import number_teachers, plan_online
from cosmos_rl.policy.config.recorded import recorded_problem
from cosmos_rl.policy.model.diffusers.flow_model import FlowModel
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.trainer.base import TaskBase, WriteExport
from cosmos_rl.policy.trainer.data_parallel import optimizer_batches
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import Encode, StepConditions
from cosmos_rl.policy.trainer.rl import batch as batches
from cosmos_rl.policy.trainer.rl.algorithm import Algorithm, Draws, Share
from cosmos_rl.policy.trainer.rl.batch import Learnable, ScoredBatch
from cosmos_rl.policy.trainer.rl.gardo import KlGate, NearestSample
from cosmos_rl.policy.trainer.rl.guard import RewardHackingGuard
from cosmos_rl.policy.trainer.rl.guard_probe import GuardProbe, HeldOut
from cosmos_rl.policy.trainer.rl.meter import Meter, count_moving, warn_if_broken
from cosmos_rl.policy.trainer.rl.moving_reference import MovingReference
from cosmos_rl.policy.trainer.rl.scoring import Scoring
from cosmos_rl.policy.trainer.rl.sizes import SizedPrompts
from cosmos_rl.policy.trainer.rl.teachers import choose_policies
from cosmos_rl.policy.trainer.rl.update import RowByRow, accumulate_gradient
from cosmos_rl.policy.trainer.rl.validation import LoadedSet, Validation
from cosmos_rl.policy.trainer.task import Notify, StepReport, ValidationReport
from cosmos_rl.reward.by_set import SetRewards
from cosmos_rl.reward.table import Rewards, RewardTable
from cosmos_rl.rollout.sampler import (
    Giving,
    Rollouts,
    RolloutSampler,
    RolloutSpec,
    Sample,
    concat_rollouts,
    group_samples,
    place_media,
)
from cosmos_rl.tracking.media import Shown
from cosmos_rl.utils.logging import logger, warn_of_all

StartNoise = Callable[[Sequence[int]], Tensor]
"""Numbers of samples in a training step over all ranks -> the noise ``[N, ...]`` that their rollouts started from, see
`RolloutSampler.draw_start`; numbers beyond the last one count from the first again."""


@dataclass(frozen=True)
class Parts:
    """Everything that a step needs, already loaded."""

    model: FlowModel
    prompts: Sequence[PromptRecord]
    rewards: Rewards
    encode: Encode
    """Distinct prompts -> their conditions on the device."""
    validation: Sequence[LoadedSet] = ()
    """What the run is validated on."""
    held_out: HeldOut | None = None
    """Samples for the guard; None: samples of the model at the start."""
    data_loss: Callable[[int, int, Level, StartNoise], Iterator[Tensor]] | None = None
    """(step, number of the optimiser step, trained levels, start noise of the step's rollouts) -> this rank's shares of
    the mean loss of real samples."""
    export: Callable[[], WriteExport] | None = None
    """Copies the weights as they are now; its result writes them into a step's folder. None: no export."""


class OnlineTask(TaskBase):
    """The task of every online algorithm."""

    def __init__(self, config: Config, context: Context, algorithm: Algorithm, parts: Parts) -> None:
        """
        Raises:
            UserError: prompts and batch do not fit, or recorded steps would take too much memory.
        """
        job = online_table(config)
        latent = parts.model.latent_shape(*config.policy.diffusers.largest_size)
        if problem := recorded_problem(config, math.prod(latent)):
            raise UserError(problem)
        self._job, self.algorithm, self.model = job, algorithm, parts.model
        self._prompts, self._encode = parts.prompts, parts.encode
        self._prompts_digest = digest_prompts(parts.prompts)  # every save asks for it
        self._give = Giving(parts.model.conditional_frames, config.train.seed)
        self._data_loss = parts.data_loss
        self.plan = plan_online(config)
        sets = SetRewards.of_config(job, parts.rewards)
        self._scoring = Scoring(parts.rewards, parts.model, job, self.plan.chunk, context, sets)
        self._sized = SizedPrompts(config, parts.prompts, self.plan.items)
        super().__init__(config, context, parts.model.trainable_parameters(), self._sized.stream, parts.export)
        self.policies = parts.model.policies(**choose_policies(job, keep_old=self.plan.keeps_old))
        self._reference = MovingReference(job, self.policies, self.optimizer)
        diffusers = config.policy.diffusers
        self._sampler = RolloutSampler(parts.model, RolloutSpec.training(diffusers), self._seed)
        evaluator = RolloutSampler(parts.model, RolloutSpec.evaluation(diffusers), self._seed)
        self._validation = Validation(job, context, parts.model, parts.validation, self._scoring, self.plan.chunk)
        for size in self._sized.sizes:
            with self.model.at_size(size):
                self._sampler.require_noise(algorithm.trained_steps)
        probe = GuardProbe(
            job.reward_hacking_guard,
            parts.model,
            context,
            sampler=self._sampler,
            evaluator=evaluator,
            prompts=interleave_sets(parts.prompts),
            seed=self._seed,
            micro_batch=job.mini_batch,
            rollout_chunk=self.plan.chunk,
        )
        self.guard = RewardHackingGuard(job.reward_hacking_guard, probe, parts.held_out)
        self._gate = KlGate(job, parts.rewards)
        self._nearest = NearestSample(job, each=config.train.rank_invariant)
        self._num_evaluations = 0  # of all ranks, before this process was started or at the last step
        self._missing_warned = self._equal_warned = False
        self._describe()

    # ---- the step ----------------------------------------------------------------------------------------------

    def train_step(self, step: int) -> StepReport:
        """Roll out, score, learn."""
        conditions = self._new_conditions()
        size = self._sized.choose(step, self.stream.positions(step))
        with self.model.at_size(size):
            report = self._train(step, conditions)
        if size is not None:  # the guard's samples have a size of their own
            conditions = self._new_conditions()
        with self.optimizer.average_parameters():
            guarded, alarm = self.guard.check(step + 1, conditions)
        return replace(report, metrics={**report.metrics, **guarded, "train/nfe": self._total_nfe()}, alarm=alarm)

    def _train(self, step: int, conditions: StepConditions) -> StepReport:
        draws = self._draws(step)
        began = time.perf_counter()
        own, pending = self._roll_out(step, conditions)
        nearest_N = self._nearest.measure(own.media, self._samples(step), self._context)
        rolled_out = time.perf_counter()
        with enter_phase("scoring"):
            tables = [self._scoring.wait(future) for future in pending]
        scored = time.perf_counter()
        batch = self._gate.apply(self._score(step, own, tables, nearest_N))
        diversity, gallery = batches.mean_diversity(own, self._context), self._build_gallery(step, batch)
        updates = self._plan_updates(draws, batch)
        in_turn = self._config.train.rank_invariant
        learnable = batches.shard_learnable(batch, updates, self._context, in_turn=in_turn)
        batch = batch.without_samples()
        del own  # or the media, which are large, would stay while the policy learns
        metrics, refusal = self._learn(draws, batch, updates, learnable, conditions)
        learnt = time.perf_counter()
        metrics |= {
            **batches.compute_reward_metrics(batch),
            "optim/learning_rate": self.optimizer.learning_rate(step),
            "optim/steps": float(self._optimizer_steps),
            "train/epoch": float(self.epoch(step)),
            "rollout/diversity": diversity,
            "time/rollout": rolled_out - began,
            "time/reward_wait": scored - rolled_out,
            "time/update": learnt - scored,
        }
        metrics |= self._reference.after_step(step + 1, metrics)
        return StepReport(metrics, refusal, gallery=gallery)

    @memory_phase("sampling")
    def _roll_out(self, step: int, conditions: StepConditions) -> tuple[Rollouts, list["Future[RewardTable] | None"]]:
        """This rank's samples; each chunk is being scored while the next one is sampled."""
        local, parts, futures = self.plan.samples, [], []
        media: Tensor | None = None
        samples = self._samples(step)[self._context.dp_rank * local :][:local]
        conditions.encode_all([sample.key for sample in samples])
        _, purpose, _ = self._draws(step).key("rollout")
        weights, policy = self.optimizer.average_parameters(), self.policies.using(self.algorithm.rollout_policy)
        with weights, policy, self.model.eval_mode():
            for first in range(0, len(samples), self.plan.chunk):
                count_parts(first, len(samples))
                chunk = samples[first : first + self.plan.chunk]
                recorder = self.algorithm.recorder(self._draws(step))
                made = self._sampler.sample(chunk, conditions, purpose, step, recorder)
                made, media = place_media(made, media, first, len(samples))
                parts.append(made)
                futures.append(self._scoring.submit(made))
        assert media is not None
        made = concat_rollouts(parts, media)
        self.compare_peers("the latents of their samples", made.latents)
        return made, futures

    def _score(self, step: int, own: Rollouts, tables: Sequence[RewardTable], nearest_N: Tensor | None) -> ScoredBatch:
        """The rewards of all ranks and their advantages."""
        batch = batches.score_batch(
            self._samples(step),
            own,
            tables,
            rewards=self._scoring.rewards,
            sets=self._scoring.sets,
            job=self._job,
            global_std=self._config.policy.diffusers.sample.global_std,
            in_pairs=self.algorithm.in_pairs,
            context=self._context,
            nearest_N=nearest_N,
        )
        reasons = batches.explain_missing(own, tables)
        if reasons and not self._missing_warned:
            logger.warning("rewards are missing; the samples are left out and counted:\n  " + "\n  ".join(reasons[:5]))
            self._missing_warned = True
        if not self._equal_warned and not self._job.bypass_reward and batches.has_no_signal(batch):
            warn_of_all(
                f"step {step + 1}: the samples of each prompt all have the same reward, so nothing can be learnt from "
                "them; cosmos-rl doctor --config checks the rewards"
            )
            self._equal_warned = True
        return batch

    def _plan_updates(self, draws: Draws, batch: ScoredBatch) -> list[list[int]]:
        """The samples of all ranks in each optimiser step of this training step."""
        size, ranks = self._job.batch_size_per_optimize, self._context.dp_size
        seed, purpose, step = draws.key(self.algorithm.purpose)
        return optimizer_batches(
            batch.learnt,
            size=None if size is None else size * ranks,
            passes=self._job.mu_iterations,
            seed=seed,
            purpose=purpose,
            step=step,
        )

    def _learn(
        self,
        draws: Draws,
        batch: ScoredBatch,
        updates: Sequence[Sequence[int]],
        learnable: Learnable,
        conditions: StepConditions,
    ) -> tuple[dict[str, float], Refusal | None]:
        """All optimiser steps of this training step, then the old policy moves; (metrics, what was refused)."""
        sets = [one.shown_name for one in self._job.dataset.sets]
        meter, results = Meter(self.algorithm.maxima, sets), []
        self.model.transformer.train()
        for number, indices in enumerate(updates):
            count_parts(number, len(updates))
            results.append(self._optimizer_step(draws, number, indices, batch, learnable, conditions, meter))
        means = meter.metrics(self._context, self._loss_weights)
        if any(result.applied for result in results):
            with self.optimizer.average_parameters():
                self.algorithm.after_step(self.policies, self._optimizer_steps, means)
            if self.optimizer.averages:  # gradients are taken at other weights than the old policy's
                self.policies.old_equals_current = False
        norms = [result.grad_norm for result in results]
        metrics = {
            **means,
            "optim/grad_norm": sum(norms) / max(len(norms), 1),
            "optim/zero_gradients": float(sum(result.refusal is Refusal.ZERO for result in results)),
            **self.optimizer.metrics(),
        }
        return metrics, most_serious_refusal(results)

    def _optimizer_step(
        self,
        draws: Draws,
        number: int,
        indices: Sequence[int],
        batch: ScoredBatch,
        learnable: Learnable,
        conditions: StepConditions,
        meter: Meter,
    ) -> StepResult:
        """The gradient of the samples at ``indices`` of the step, over all ranks, and one step along it."""
        context, algorithm, step = self._context, self.algorithm, draws.step
        value_N = algorithm.values(batch.used_N).float()
        invariant = self._config.train.rank_invariant
        share = batches.take_share(indices, batch, learnable, value_N, self._job, context, in_turn=invariant)
        rows = algorithm.rows(share, levels=self._sampler.trained_levels(), draws=draws, number=number)
        conditions.encode_all(rows.prompts)
        self._seed_dropout(draws, number)
        total_weight = float(len(indices) * (len(rows.prompts) // len(share.prompts)))
        data_losses = self._data_term(draws, number, total_weight)
        current = self.policies.old_equals_current and not self.model.has_dropout()
        terms = accumulate_gradient(
            self.model,
            self.policies,
            algorithm,
            rows,
            conditions,
            micro_batch=self._job.mini_batch,
            frozen=algorithm.frozen(old_is_current=current, kl_beta=self._kl_beta),
            kl_beta=self._kl_beta,
            loss_factor=self.optimizer.loss_factor,
            references=number_teachers(self._job),
            max_over_ranks=context.max_over_ranks,
            row_by_row=self._add_row_by_row(draws, number, share) if invariant else None,
        )
        values = meter.add(terms, rows)
        warn_if_broken(step, terms, rows)
        if data_losses is not None:
            values["data_loss"] = [mean * total_weight for mean in data_losses]  # like the others: over all rows
            meter.add_values("data_loss", values["data_loss"])
        moving = count_moving(terms, rows, algorithm.neutral)
        *parts, moving = context.sum_exactly([*(values.get(name, ()) for name in self._loss_weights), [moving]])
        loss = sum(weight * part for weight, part in zip(self._loss_weights.values(), parts, strict=True))
        differ = parts[-1] > 0.0 or moving > 0.0
        result = self.apply_gradient(step, weight=total_weight, loss=loss / total_weight, expects_gradient=differ)
        if result.applied:
            self.policies.old_equals_current = False
        return result

    def _add_row_by_row(self, draws: Draws, number: int, share: Share) -> RowByRow:
        """Rows are the first level of each sample, then the second: the gradients of each make a block of the sum."""
        seed, purpose, step = draws.key("dropout/row")
        ids, count = share.sample_ids, len(share.sample_ids)

        def seed_row(row: int) -> None:
            torch.manual_seed(randomness.torch_seed(seed, purpose, step, number, row // count, ids[row % count]))

        def collect(row: int) -> None:
            self.collect_gradient()
            if (row + 1) % count == 0:
                self.end_block()

        return RowByRow(seed_row, collect)

    def _data_term(self, draws: Draws, number: int, total_weight: float) -> list[float] | None:
        """Add ``total_weight`` times the gradient of real samples; this rank's shares of their mean loss."""
        beta = self._job.data_term.beta
        if self._data_loss is None or beta == 0.0:
            return None
        self.model.set_gradient_sync(self._config.train.rank_invariant)
        factor, found = beta * total_weight * self.optimizer.loss_factor, []
        with self.model.at_size(self._sized.data_size):
            recorder, levels = self.algorithm.recorder(draws), self._sampler.trained_levels()
            if recorder is not None:
                levels = levels.rows(torch.tensor(recorder.indices))
            start = functools.partial(self._draw_start, draws, self._samples(draws.step))
            for loss in self._data_loss(draws.step, number, levels, start):
                (factor * loss).backward()
                self.collect_gradient()
                found.append(float(loss.detach()))
        self.end_block()
        return found

    def _draw_start(self, draws: Draws, samples: Sequence[Sample], numbers: Sequence[int]) -> Tensor:
        """`StartNoise` of a step with these samples: drawn from its keys once more."""
        _, purpose, step = draws.key("rollout")
        return self._sampler.draw_start([samples[k % len(samples)] for k in numbers], purpose, step)

    # ---- validation --------------------------------------------------------------------------------------------

    def start(self, step: int) -> None:
        """Let the guard measure the start: before the first step, or where a checkpoint knows nothing of it."""
        with self.optimizer.average_parameters():
            self.guard.begin(step, self._new_conditions())

    def validate(self, step: int, notify: Notify) -> ValidationReport:
        """Samples of the validation prompts with the averaged weights, scored; changes no trained tensor."""
        with self.use_averaged_weights(), self.policies.using("default"), self.model.eval_mode():
            validated = self._validation.run(step, self.total_steps, notify)
        if validated is None:
            return ValidationReport()
        self._total_nfe()  # here, so that a checkpoint of this step holds them
        if validated.untrained:
            self.guard.note_validation(step, validated.untrained, validated.made_from)
        return validated.report

    # ---- state -------------------------------------------------------------------------------------------------

    def extra_tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Old policy, reference, teachers, and the guard's own samples."""
        found = {"old": self.policies.old_state(), "reference": self.policies.reference_state()}
        found |= {f"teacher{number}": state for number, state in enumerate(self.policies.teacher_states(), 1)}
        guard = self.guard.tensors()
        if guard:
            found["guard"] = guard
        return found

    def fingerprint(self) -> dict[str, Any]:
        """What the positions in the prompts and the draws depend on."""
        return {
            "seed": self._seed,
            "samples_per_step": self.plan.total,
            "n_generation": self.plan.group,
            **self._sized.fingerprint(),
            "teachers of the prompt sets, by number": list(number_teachers(self._job)),
            "prompts": f"{self.stream.length} ({self._prompts_digest})",
            "dataloader_seed": self._job.dataloader_seed,
            "dataloader_shuffle": self._job.dataloader_shuffle,
            "dataloader_drop_last": self._job.dataloader_drop_last,
            "trained denoisers (policy.diffusers.trained_denoiser)": sorted(self.model.denoisers),
        }

    def state_dict(self) -> dict[str, Any]:
        """Counters that a resumed run continues from."""
        return {
            **super().state_dict(),
            "evaluations": self._num_evaluations,
            "old_equals_current": self.policies.old_equals_current,
            "guard": self.guard.state_dict(),
            "rewards": self._scoring.settings(),
            "kl_gate": self._gate.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "reference": self._reference.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the counters of a checkpoint."""
        super().load_state_dict(state)
        self._num_evaluations = int(state["evaluations"])
        self.policies.old_equals_current = bool(state["old_equals_current"])
        self.guard.load_state_dict(state["guard"])
        self._gate.load_state_dict(state["kl_gate"])
        self.algorithm.load_state_dict(state.get("algorithm", {}))
        self._reference.load_state_dict(state.get("reference", {}))
        self.optimizer.lr_factor = self.guard.lr_factor
        self._scoring.warn_if_changed(state["rewards"])

    def on_rewind(self, step: int, rewinds: int) -> None:
        """Learning rate, KL weight and the random draws depend on how often the run was rewound."""
        self.guard.on_rewind(step, rewinds)
        self.optimizer.lr_factor = self.guard.lr_factor

    def close(self) -> None:
        """End what scores samples."""
        self._nearest.close()
        self._scoring.rewards.close()
        self._validation.close()

    # ---- small parts -------------------------------------------------------------------------------------------

    def _new_conditions(self) -> StepConditions:
        return StepConditions(self._encode, each=self._config.train.rank_invariant)

    def _draws(self, step: int) -> Draws:
        return Draws(self._seed, step, self.guard.rewinds)

    def _samples(self, step: int) -> list[Sample]:
        """All of a step: prompts x samples, a contiguous block for each rank."""
        positions = self.stream.positions(step)
        records = ((p.sample_id, self._prompts[p.index]) for p in positions)
        return group_samples(records, self.plan.group, self._give, self._sized.choose(step, positions))

    @property
    def _kl_beta(self) -> float:
        return self._job.kl_beta * self.guard.kl_factor

    @property
    def _loss_weights(self) -> dict[str, float]:
        """The parts of the loss by their names among the terms."""
        job = self._job
        weights = {"policy_loss": 1.0, "kl_loss": self._kl_beta, "norm_loss": job.norm_penalty}
        return {**weights, "data_loss": job.data_term.beta}

    def _seed_dropout(self, draws: Draws, number: int) -> None:
        seed, purpose, step = draws.key("dropout")
        torch.manual_seed(randomness.torch_seed(seed, purpose, step, number, self._context.dp_rank))

    def _build_gallery(self, step: int, batch: ScoredBatch) -> Sequence[Shown]:
        done, interval = step + 1, self._config.logging.multi_modal_log_interval
        if not batches.is_gallery_due(done, self.total_steps, interval):
            return ()
        return batches.build_gallery(batch)

    def _total_nfe(self) -> float:
        """Network evaluations of all ranks since the start of the run; a backward pass counts as two. All ranks must
        call it."""
        (count,) = self._context.sum_over_ranks([float(self.model.num_evaluations)])
        self.model.num_evaluations = 0
        self._num_evaluations += int(count)
        return float(self._num_evaluations)

    def _describe(self) -> None:
        count = sum(p.numel() for p in self.params.values())
        what = "whole transformer"
        if self.model.lora_config is not None:
            what = "LoRA adapter"
        logger.info(
            f"{self.algorithm.name} on the {what}: {count:,} parameters on {self._context.device}; "
            f"{self.stream.length} prompts, {self.stream.batch} per step x {self.plan.group} samples = "
            f"{self.plan.total}, {self.plan.sigmas} of {len(self._sampler.trained_levels().sigma)} noise "
            f"levels each, rewards {', '.join(self._scoring.rewards.names)}; {self.total_steps} steps"
        )
