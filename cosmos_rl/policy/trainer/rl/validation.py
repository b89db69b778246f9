"""Validation of reinforcement learning: samples of fixed prompts from fixed noise, scored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from cosmos_rl.data.prompts import PromptRecord, digest_prompts
from cosmos_rl.distributed.context import Context
from cosmos_rl.policy.config import Config, validation_chunk
from cosmos_rl.policy.model.diffusers.flow_model import FlowModel
from cosmos_rl.policy.trainer.data_parallel import gather_over_ranks
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import StepConditions
from cosmos_rl.policy.trainer.own_media import OwnMedia
from cosmos_rl.policy.trainer.rl import batch as batches
from cosmos_rl.policy.trainer.rl.guard_probe import digest_texts
from cosmos_rl.policy.trainer.rl.scoring import Scoring
from cosmos_rl.policy.trainer.task import Notify, ValidationReport
from cosmos_rl.rollout.sampler import Giving, RolloutSampler, build_validation_samples
from cosmos_rl.tracking.media import Shown


@dataclass(frozen=True)
class Validated:
    """What one validation gives."""

    report: ValidationReport
    untrained: Mapping[str, Tensor]
    """Scores ``[N]`` that training does not use, for the guard."""
    made_from: str
    """Digest of what those scores depend on; others do not compare."""


class Validator:
    """Samples and scores all validation prompts, divided over the ranks."""

    def __init__(
        self,
        config: Config,
        context: Context,
        model: FlowModel,
        sampler: RolloutSampler,
        prompts: Sequence[PromptRecord],
        scoring: Scoring,
        trained: Mapping[str, float],
    ) -> None:
        """``trained``: weights of the rewards of training."""
        self._config, self._context, self._model = config, context, model
        self._sampler, self._prompts, self._scoring, self._trained = sampler, prompts, scoring, trained

    def run(self, conditions: StepConditions, notify: Notify) -> Validated:
        """With the policy as it is."""
        config, context, model, scoring = self._config, self._context, self._model, self._scoring
        names = scoring.rewards.names
        giving = Giving(model.conditional_frames)
        samples = build_validation_samples(self._prompts, config.validation.n_generation, giving)
        mine, own_media = samples[context.dp_rank :: context.dp_size], OwnMedia(context)
        conditions.encode_all([sample.key for sample in mine], [sample.negative for sample in mine])

        def make(indices: Sequence[int], number: int) -> tuple[Tensor, ...]:
            notify("pre_per_step_validation_hook", {"batch_index": number})
            rollouts = self._sampler.sample([samples[i] for i in indices], conditions, "validation/rollout", 0)
            table = scoring.wait(scoring.submit(rollouts))
            about = {"batch_index": number, "val_score": batches.mean(table.total_N)}
            notify("post_per_step_validation_hook", about)
            return own_media.keep(indices, rollouts.media), rollouts.finite, batches.stack_columns(table, names)

        size = validation_chunk(config, len(self._prompts))
        blank, finite, reward_NF = gather_over_ranks(len(samples), size, context, make)
        metrics = batches.compute_validation_metrics(reward_NF, names)
        scores = [batches.to_score_dict(row, names) for row in reward_NF]
        images = [
            Shown(own_media[i], one.prompt, one.sample_id, "fixed", scores[i], whole, empty, model.fps)
            for i, (one, whole, empty) in enumerate(zip(samples, finite.tolist(), blank.tolist(), strict=True))
            if own_media.are_images
        ]
        report = ValidationReport(metrics, images, objective=-metrics["val/reward/mean"])
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
