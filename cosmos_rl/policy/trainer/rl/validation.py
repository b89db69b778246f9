"""Validation of reinforcement learning: samples of fixed prompts from fixed noise, scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from cosmos_rl.data.prompts import PromptRecord, digest_prompts
from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.config import GrpoPolicyConfig, validation_chunk
from cosmos_rl.policy.config.validation_sets import ValidationSet
from cosmos_rl.policy.model.diffusers.flow_model import FlowModel
from cosmos_rl.policy.trainer.data_parallel import gather_over_ranks
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import Encode, StepConditions
from cosmos_rl.policy.trainer.own_media import OwnMedia
from cosmos_rl.policy.trainer.peers import compare_fingerprints
from cosmos_rl.policy.trainer.rl import batch as batches
from cosmos_rl.policy.trainer.rl.guard_probe import digest_texts
from cosmos_rl.policy.trainer.rl.scoring import Scoring
from cosmos_rl.policy.trainer.task import Notify, ValidationReport, merge_reports
from cosmos_rl.reward.table import Rewards
from cosmos_rl.rollout.sampler import Giving, RolloutSampler, RolloutSpec, build_validation_samples
from cosmos_rl.tracking.media import Shown


@dataclass(frozen=True)
class Validated:
    """What one validation gives."""

    report: ValidationReport
    untrained: Mapping[str, Tensor]
    """Scores ``[N]`` that training does not use, for the guard."""
    made_from: str
    """Digest of what those scores depend on; others do not compare."""


@dataclass(frozen=True)
class LoadedSet:
    """A validation set, its prompts, and what judges the samples."""

    chosen: ValidationSet
    prompts: Sequence[PromptRecord]
    encode: Encode
    """Distinct prompts -> their conditions on the device, for the guidance of this set."""
    rewards: Rewards | None = None
    """None: those of training."""


class Validation:
    """All validation sets of a run."""

    def __init__(
        self,
        job: GrpoPolicyConfig,
        context: Context,
        model: FlowModel,
        sets: Sequence[LoadedSet],
        trained: Scoring,
        chunk: int,
    ) -> None:
        """
        Args:
            trained: the rewards of training.
            chunk: samples in one request for scores.
        """
        compare_fingerprints({f"the prompts of {one.chosen.key}": digest_prompts(one.prompts) for one in sets}, context)
        self._own: list[Rewards] = []
        """Rewards that are not those of training."""
        self._validators = []
        weights = {name: weight for name, weight in trained.rewards.weights.items() if trained.sets.is_used(name)}
        for one in sets:
            # without the prompt sets of training, whose rewards are not those of validation
            scoring = Scoring(one.rewards or trained.rewards, model, job, chunk, context)
            self._own += [scoring.rewards] if scoring.rewards is not trained.rewards else []
            self._validators.append(Validator(context, model, one, scoring, weights))

    def run(self, done: int, total: int, notify: Notify) -> Validated | None:
        """The sets that are due after ``done`` of ``total`` steps, with the policy as it is; None: none is.

        The objective, and what the guard looks at, are those of the first set.
        """
        found = [one.run(notify) if one.chosen.is_due(done, total) else None for one in self._validators]
        if not any(found):
            return None
        first = found[0] or Validated(ValidationReport(), {}, "")
        return replace(first, report=merge_reports([one and one.report for one in found]))

    def close(self) -> None:
        """End the rewards that only validation has."""
        for rewards in self._own:
            rewards.close()


class Validator:
    """Samples and scores the prompts of one set, divided over the ranks."""

    def __init__(
        self, context: Context, model: FlowModel, loaded: LoadedSet, scoring: Scoring, trained: Mapping[str, float]
    ) -> None:
        """``trained``: weights of the rewards that score samples of training."""
        self.chosen = loaded.chosen
        self._config, self._context, self._model = loaded.chosen.config, context, model
        spec = RolloutSpec.evaluation(self._config.policy.diffusers)
        self._sampler = RolloutSampler(model, spec, self._config.train.seed)
        self._prompts, self._encode = loaded.prompts, loaded.encode
        self._scoring, self._trained = scoring, trained

    def run(self, notify: Notify) -> Validated:
        """With the policy as it is."""
        with self._model.at_size(self.chosen.size):
            conditions = StepConditions(self._encode, each=self._config.train.rank_invariant)
            return self._run(conditions, notify)

    def _run(self, conditions: StepConditions, notify: Notify) -> Validated:
        config, context, model, scoring = self._config, self._context, self._model, self._scoring
        names, about_set = scoring.rewards.names, {"set": self.chosen.label} if self.chosen.label else {}
        giving = Giving(model.conditional_frames)
        samples = build_validation_samples(self._prompts, config.validation.n_generation, giving)
        mine, own_media = samples[context.dp_rank :: context.dp_size], OwnMedia(context)
        conditions.encode_all([sample.key for sample in mine], [sample.negative for sample in mine])

        def make(indices: Sequence[int], number: int) -> tuple[Tensor, ...]:
            notify("pre_per_step_validation_hook", {"batch_index": number, **about_set})
            rollouts = self._sampler.sample([samples[i] for i in indices], conditions, "validation/rollout", 0)
            table = scoring.wait(scoring.submit(rollouts))
            about = {"batch_index": number, "val_score": batches.mean(table.total_N), **about_set}
            notify("post_per_step_validation_hook", about)
            return own_media.keep(indices, rollouts.media), rollouts.finite, batches.stack_columns(table, names)

        size = validation_chunk(config, len(self._prompts))
        blank, finite, reward_NF = gather_over_ranks(len(samples), size, context, make)
        metrics = batches.compute_validation_metrics(reward_NF, names)
        scores = [batches.to_score_dict(row, names) for row in reward_NF]
        images = [
            Shown(
                own_media[i], one.prompt, one.sample_id, "fixed", scores[i], whole, empty, model.fps, self.chosen.label
            )
            for i, (one, whole, empty) in enumerate(zip(samples, finite.tolist(), blank.tolist(), strict=True))
            if own_media.are_images
        ]
        objective = -metrics["val/reward/mean"]
        report = ValidationReport(self.chosen.rename(metrics), images, objective)
        untrained = self._find_untrained()
        return Validated(report, {name: reward_NF[:, i] for name, i in untrained.items()}, self._digest(untrained))

    def _find_untrained(self) -> dict[str, int]:
        """Rewards that training does not use, and their columns."""
        rewards = self._scoring.rewards
        return {
            name: 1 + i
            for i, name in enumerate(rewards.names)
            if not self._trained.get(name) and name not in rewards.terms
        }

    def _digest(self, names: Mapping[str, int]) -> str:
        made = (self._config.train.seed, self._sampler.spec, self._config.validation.n_generation)
        origins = [self._scoring.rewards.origins[name] for name in names]
        return digest_texts(*made, digest_prompts(self._prompts), *origins)
