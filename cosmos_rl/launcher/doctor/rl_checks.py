"""Does a reinforcement-learning configuration do what a run relies on: sample, agree with training, score, learn."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.algorithms.advantage import all_equal
from cosmos_rl.data.given import PromptKey, find_media_problems, make_grey, text_of
from cosmos_rl.data.prompt_sets import load_prompts
from cosmos_rl.data.prompts import PromptRecord, find_file
from cosmos_rl.data.set_stream import interleave_sets
from cosmos_rl.diffusion.churn import build_transitions
from cosmos_rl.diffusion.kernels import Kernel, predict_clean
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.doctor.finding import FAIL, INFO, OK, WARN, Finding, choose_mark
from cosmos_rl.launcher.doctor.measures import check_gradients, relative_distance
from cosmos_rl.policy.config import Config, GrpoPolicyConfig
from cosmos_rl.policy.config.jobs import online_table
from cosmos_rl.policy.config.plan import number_teachers
from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import StepConditions, add_media
from cosmos_rl.policy.trainer.rl.algorithm import Draws, Share
from cosmos_rl.policy.trainer.rl.batch import build_scoring_request
from cosmos_rl.policy.trainer.rl.build import build_algorithm
from cosmos_rl.policy.trainer.rl.teachers import choose_policies, find_sets, load_teachers
from cosmos_rl.policy.trainer.rl.update import accumulate_gradient
from cosmos_rl.reward.build import make_rewards
from cosmos_rl.reward.by_set import SetRewards
from cosmos_rl.reward.combine import clip_scores
from cosmos_rl.reward.table import Rewards, RewardTable, ScoringRequest
from cosmos_rl.rollout.sampler import (
    Giving,
    Rollouts,
    RolloutSampler,
    RolloutSpec,
    Sample,
    group_samples,
    measure_diversity,
)

_PROMPTS, _GROUP = 2, 3
_PURPOSE = "doctor/rollout"


@dataclass(frozen=True)
class Sampled:
    """What the later checks use."""

    made: Rollouts
    conditions: StepConditions


def examine_rl(config: Config, model: PipelineModel) -> Iterator[Finding]:
    """Prompts, rollout, rewards and one gradient; gradients are left in the model for the export."""
    job = online_table(config)
    try:
        found = load_prompts(job.dataset, "train.train_policy.dataset", split="train")
    except UserError as error:
        yield Finding(FAIL, "prompts", str(error))
        return
    prompts = interleave_sets(found)[: max(_PROMPTS, len(job.dataset.sets))]
    yield Finding(OK, "prompts", f"the first is {prompts[0].prompt[:60]!r}")
    samples = group_samples(enumerate(prompts), _GROUP, Giving(model.conditional_frames))
    if model.conditional_frames[1] > 0:
        media = _media(model, prompts)
        yield media
        if media.mark == FAIL:
            return
        samples = [_with_frames(config, model, sample) for sample in samples]
    guided = config.policy.diffusers.sample.guidance_scale > 1
    conditions = _encode_with(config, model, guided=guided)
    spec, seed = RolloutSpec.training(config.policy.diffusers), config.train.seed
    policies, algorithm = model.policies(keep_old=False, keep_reference=False), build_algorithm(config)
    sampler = RolloutSampler(model, spec, seed)
    try:
        sampler.require_noise(algorithm.trained_steps)
    except UserError as error:
        yield Finding(FAIL, "trained steps", str(error))
        return
    with policies.using(algorithm.rollout_policy), model.eval_mode():
        made = sampler.sample(samples, conditions, _PURPOSE, 0, algorithm.recorder(Draws(seed, 0)))
    yield (rollout := _rollout(made))
    if rollout.mark == FAIL:
        return
    yield _agreement(config, model, spec, samples)
    if algorithm.rollout_policy == "old":
        yield _old_policy(model, made, conditions)
    yield from _rewards(config, model, made)
    yield from _learning(config, job, model, Sampled(made, conditions))


# ---- rollout -----------------------------------------------------------------------------------------------------


def _rollout(made: Rollouts) -> Finding:
    if not bool(made.latents.isfinite().all()):
        return Finding(FAIL, "rollout", "samples hold NaN or infinity", "a lower noise_level, or another solver")
    found = measure_diversity(made.media, [sample.group for sample in made.samples])
    diversity = sum(found) / max(len(found), 1)
    text = f"{len(made.samples)} samples; those of one prompt differ by {diversity:.2g} of the range of a pixel"
    if diversity > 0:
        return Finding(OK, "rollout", text)
    return Finding(FAIL, "rollout", text, "all samples of a prompt are alike, so no reward can distinguish them")


def _media(model: PipelineModel, prompts: Sequence[PromptRecord]) -> Finding:
    """Whether the images and videos that the prompts name can be read."""
    least, most = model.conditional_frames
    problems = find_media_problems(prompts, (0, most), model.count_given(most))
    if problems:
        return Finding(FAIL, "images and videos", problems)
    without = sum(find_file(record) is None for record in prompts)
    text = f"{len(prompts) - without} of {len(prompts)} prompts name one"
    if without and least > 0:
        fix = 'a prompt needs an "image" or a "video"; a grey one is taken for these checks'
        return Finding(WARN, "images and videos", text, fix)
    return Finding(OK, "images and videos", text)


def _with_frames(config: Config, model: PipelineModel, sample: Sample) -> Sample:
    """A sample of a model that needs a medium, with a grey one where its prompt has none."""
    least, _ = model.conditional_frames
    if least == 0 or sample.given is None or sample.given.clean > 0:
        return sample
    size = config.policy.diffusers.inference_size
    return replace(sample, given=make_grey(least, model.count_given(least), *size))


def _encode_with(config: Config, model: PipelineModel, *, guided: bool) -> StepConditions:
    """Conditions of prompts and their media, past the caches."""

    def encode(prompts: Sequence[PromptKey], negatives: Sequence[str]) -> Any:
        cond = model.encode_prompts([text_of(prompt) for prompt in prompts], negatives if guided else None)
        return add_media(model, cond, prompts, config.policy.diffusers.inference_size)

    return StepConditions(encode)


def _agreement(config: Config, model: PipelineModel, spec: RolloutSpec, samples: Sequence[Sample]) -> Finding:
    """The velocities that the sampler followed, read off its states, against those that training computes there."""
    solver = "euler" if spec.solver == "dance" else spec.solver
    quiet = replace(spec, solver=solver, deterministic=True, guidance=1.0)  # training knows no guidance
    conditions = _encode_with(config, model, guided=False)
    few = [samples[0], samples[-1]]
    levels = model.sampling_levels(spec.num_steps)
    with model.eval_mode(), torch.no_grad():
        states = RolloutSampler(model, quiet, config.train.seed).trajectory(few, conditions, _PURPOSE, 0)
        if len(states) != len(levels.sigma):
            return Finding(FAIL, "rollout = training", f"{len(states)} states for {spec.num_steps} steps")
        cond = conditions([sample.key for sample in few])
        sigmas = levels.sigma.tolist()
        _, kernel = build_transitions(solver, levels.sigma, noise_level=0.0, deterministic=True)
        followed = _follow_trained(states, sigmas, kernel)
        apart = []
        for index, (velocity, state) in enumerate(zip(followed, states, strict=False)):
            trained = model.velocity(state, levels.rows(index).expand(len(few)), cond)
            apart.append(relative_distance(_keep_generated(velocity, cond), _keep_generated(trained, cond)))
    worst = max(range(len(apart)), key=apart.__getitem__)
    exact = config.train.param_dtype == "float32"
    text = f"velocities differ by {apart[worst]:.1e} (relative), most at noise level {sigmas[worst]:.3g}"
    if apart[worst] <= (1e-3 if exact else 5e-2):
        return Finding(OK, "rollout = training", text)
    fix = "pipeline_with_logprob must call the transformer as training does: same input, timestep and noise levels"
    return Finding(FAIL, "rollout = training", text, fix)


def _keep_generated(values: Tensor, cond: Any) -> Tensor:
    """Values like a state with 0 at the elements that media give."""
    if cond.element_mask is None:
        return values
    return torch.where(cond.element_mask.to(values.device), values, 0)


def _follow_trained(states: Sequence[Tensor], sigmas: Sequence[float], kernel: Kernel) -> list[Tensor]:
    """``v`` of each step ``z' = a z + g v + h d_prev``."""
    found, history = [], None
    for index, (state, following) in enumerate(pairwise(states)):
        step = kernel(index, sigmas)
        rest = following - step.a * state - (0.0 if history is None else step.h * history)
        found.append(rest / step.g)
        history = predict_clean(state, found[-1], sigmas[index])
    return found


def _old_policy(model: PipelineModel, made: Rollouts, conditions: StepConditions) -> Finding:
    """The ratio of the policies is 1 before anything is learnt."""
    policies = model.policies(keep_old=True, keep_reference=False)
    latents = made.latents.to(model.device)
    level, cond = model.training_level(torch.full((len(latents),), 0.5)), conditions([s.key for s in made.samples])
    found = {}
    with torch.no_grad(), model.eval_mode():
        for name in ("default", "old"):
            with policies.using(name):
                found[name] = _keep_generated(model.velocity(latents, level, cond), cond)
    apart = relative_distance(found["old"], found["default"])
    text = f"differs from the trained one by {apart:.1e} (relative) before the first step"
    return Finding(choose_mark(apart == 0), "old policy", text)


# ---- rewards -----------------------------------------------------------------------------------------------------


def _rewards(config: Config, model: PipelineModel, made: Rollouts) -> Iterator[Finding]:
    """Every reward gives numbers, and different ones for different images."""
    job = online_table(config)
    if job.bypass_reward:
        yield Finding(INFO, "rewards", "all 0, as train.train_policy.bypass_reward = true sets")
        return
    if not job.use_remote_reward and not job.local_reward.reward_fns:
        yield Finding(WARN, "rewards", "none in the configuration; those that a script gives are not tried")
        return
    try:
        prompts = [(f'the prompt "{sample.prompt[:60]}"', sample.metadata) for sample in made.samples]
        rewards = make_rewards(config, None, validation=False, prompts=prompts)
    except UserError as error:
        yield Finding(FAIL, "rewards", str(error))
        return
    try:
        sets = SetRewards.of_config(job, rewards)
        for number, rows in sets.split([sample.prompt_set for sample in made.samples]):
            yield from _rewards_of_set(job, rewards, model, sets, _take_rows(made, rows), number)
    except (UserError, TimeoutError) as error:
        yield Finding(FAIL, "rewards", str(error))
    finally:
        rewards.close()


def _take_rows(made: Rollouts, rows: Sequence[int]) -> Rollouts:
    own = list(rows)
    return replace(made, samples=tuple(made.samples[i] for i in own), media=made.media[own], latents=made.latents[own])


def _rewards_of_set(
    job: GrpoPolicyConfig, rewards: Rewards, model: PipelineModel, sets: SetRewards, made: Rollouts, number: int
) -> Iterator[Finding]:
    """Those of one prompt set, on samples of it."""
    where = f" ({sets.labels[number]})" if sets.labels else ""
    names = [name for name in rewards.names if sets.counts(number, name)]
    latents = model.reward_latents(made.latents) if rewards.sends_latents else None
    table = _score(rewards, replace(build_scoring_request(made, latents), rewards=names), job)
    probes = _probes(made.media)
    images, first = len(probes), made.samples[0]
    latents = _encode_probes(model, probes) if rewards.sends_latents else None
    about = ([first.prompt] * images, [first.metadata] * images, list(range(images)))
    probed = _score(rewards, ScoringRequest(probes, *about, made.fps, latents, names), job)
    for name in (name for name in names if name not in rewards.terms):
        yield _reward(name, where, table, probed.scores[name])
    scores = {name: table.scores[name] for name in names}
    total = table.total_N[~table.missing_N]
    counted = [total] if job.normalise_rewards == "sum" else list(clip_scores(rewards, scores).values())
    alike = not any(map(_varies, counted))
    if len(total) == len(made.samples) and any(map(_varies, scores.values())) and alike:
        text = f"{float(total[0]):.4g} for every sample: weights or clips take away all difference"
        fix = "look at clip_min, clip_max, reward_clip_min and reward_clip_max"
        yield Finding(FAIL, f"reward in all{where}", text, fix)


def _score(rewards: Rewards, request: ScoringRequest, job: GrpoPolicyConfig) -> RewardTable:
    seconds = len(request.prompts) * job.local_reward.timeout_s + 2 * job.remote_reward.timeout_s
    future = rewards.submit(request)
    if not wait([future], seconds).done:
        raise TimeoutError(f"no scores after {seconds:g} s")
    return future.result()


def _reward(name: str, where: str, table: RewardTable, probed: Tensor) -> Finding:
    scores, subject = table.scores[name], f"reward {name}{where}"
    valid = scores[scores.isfinite()]
    missing = len(scores) - len(valid)
    if len(valid) == 0:
        why = next(iter(table.reasons.values()), "no reason was given")
        return Finding(FAIL, subject, f"no score for any of {missing} samples: {why}")
    text = f"{float(valid.min()):.4g} ... {float(valid.max()):.4g} on {len(valid)} samples"
    if missing:
        why = next(iter(table.reasons.values()), "")
        return Finding(WARN, subject, f"{text}; missing for {missing}: {why}")
    if _varies(valid):
        return Finding(OK, subject, text)
    if not _varies(probed[probed.isfinite()]):
        text = f"always {float(valid[0]):.4g}, also for plain and noisy images: it measures nothing"
        return Finding(FAIL, subject, text)
    return Finding(WARN, subject, f"{float(valid[0]):.4g} for all samples; other images get other scores")


def _varies(values: Tensor) -> bool:
    return not all_equal(values)


def _probes(media: Tensor) -> Tensor:
    """Black, white, half and half, and noise, each like one of the samples."""
    shape = media.shape[1:]
    half = torch.zeros(shape, dtype=torch.uint8)
    half[..., : shape[-2] // 2, :] = 255
    noise = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return torch.stack([torch.zeros_like(half), torch.full_like(half, 255), half, noise])


def _encode_probes(model: PipelineModel, videos: Tensor) -> Tensor:
    """Probes ``[N, T, H, W, 3]`` as what the reward service decodes."""
    visuals = videos.movedim(-1, 1).float() / 127.5 - 1
    states = model.encode_visuals(list(visuals), *videos.shape[-3:-1], at_once=1)
    return model.reward_latents(states)


# ---- learning ----------------------------------------------------------------------------------------------------


def _learning(config: Config, job: GrpoPolicyConfig, model: PipelineModel, sampled: Sampled) -> Iterator[Finding]:
    """The gradient of one micro-batch in which samples are good and bad in turns."""
    policies = model.policies(**choose_policies(job, keep_old=True))
    try:
        load_teachers(config, model, policies)
    except UserError as error:
        yield Finding(FAIL, "teacher", str(error))
        return
    made, algorithm = sampled.made, build_algorithm(config)
    count = min(job.mini_batch, len(made.samples))
    few, row, rejected = made.samples[:count], torch.arange(count), None
    if algorithm.in_pairs:
        rejected = torch.arange(len(made.samples)).flip(0)[:count]
    share = Share(
        [sample.sample_id for sample in few],
        [sample.key for sample in few],
        made.learnable,
        row,
        algorithm.values(row.remainder(2).double() * 2.0 - 1.0).float(),
        torch.ones(count),
        range(count),
        rejected,
        prompt_set=find_sets(job, few),
    )
    levels = model.sampling_levels(config.policy.diffusers.sample.num_steps).rows(slice(-1))
    rows = algorithm.rows(share, levels=levels, draws=Draws(config.train.seed, 0), number=0)
    model.transformer.train()
    terms = accumulate_gradient(
        model,
        policies,
        algorithm,
        rows,
        sampled.conditions,
        micro_batch=count,
        frozen=algorithm.frozen(old_is_current=False, kl_beta=job.kl_beta),
        kl_beta=job.kl_beta,
        references=number_teachers(job),
    )
    value = float(terms["policy_loss"].double().mean())
    yield Finding(choose_mark(math.isfinite(value)), "forward", f"loss {value:.4g} on {count} samples")
    if math.isfinite(value):
        yield from check_gradients(model, len(rows.prompts))
