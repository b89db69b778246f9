"""From a configuration to an online task: algorithm, pipeline, prompts, rewards, held-out and real samples."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.data.bucket_stream import BucketStream
from cosmos_rl.data.given import PromptKey, choose_own, join_key
from cosmos_rl.data.items import Item, Readable, to_item
from cosmos_rl.data.local_pairs import LocalPairs
from cosmos_rl.data.prompts import PromptRecord, find_sampling_keys, locate_metadata, to_prompt_record
from cosmos_rl.data.set_stream import interleave_sets
from cosmos_rl.data.streams import Batch, MapStream, Skipped, find_items, load_batches
from cosmos_rl.distributed import randomness
from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config, GrpoPolicyConfig
from cosmos_rl.policy.config.buckets import Sides
from cosmos_rl.policy.config.jobs import job_kind, latents_keys, load_part, online_table
from cosmos_rl.policy.config.plan import plan_online
from cosmos_rl.policy.config.validation_sets import ValidationSet, asks_service, list_validation_sets
from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.model.driver.contract import Level
from cosmos_rl.policy.trainer.base import count_steps
from cosmos_rl.policy.trainer.diffusers_trainer.common import (
    build_model,
    choose_prompts,
    expect_clean_frames,
    open_dataset,
    prepare_export,
    require_counted_media,
    require_media,
)
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import Encode, Encoding, TextPair
from cosmos_rl.policy.trainer.diffusers_trainer.noising import NoisedSamples, Noising
from cosmos_rl.policy.trainer.rl.algorithm import Algorithm
from cosmos_rl.policy.trainer.rl.guard_probe import HeldOut, digest_texts, pick_diversity_samples
from cosmos_rl.policy.trainer.rl.online import OnlineTask, Parts, StartNoise
from cosmos_rl.policy.trainer.rl.sizes import SizedPrompts
from cosmos_rl.policy.trainer.rl.teachers import load_teachers
from cosmos_rl.policy.trainer.rl.validation import LoadedSet
from cosmos_rl.reward import RewardFns
from cosmos_rl.reward.build import make_rewards
from cosmos_rl.reward.table import Rewards
from cosmos_rl.rollout.sampler import takes_start_noise
from cosmos_rl.utils.logging import warn_of_all

DataLoss = Callable[[int, int, Level, StartNoise], Iterator[Tensor]]


def build_algorithm(config: Config) -> Algorithm:
    """The algorithm that ``config`` names."""
    return load_part(job_kind(config).algorithm)(config)


def build_online(
    config: Config,
    context: Context,
    *,
    dataset: Any,
    val_dataset: Any = None,
    reward_fns: RewardFns | None = None,
    val_reward_fns: RewardFns | None = None,
) -> OnlineTask:
    """Load everything that ``config`` names.

    Raises:
        UserError: prompts, rewards, model or data do not fit the configuration.
    """
    job = online_table(config)
    prompts = _records(open_dataset(dataset, config, "dataset"))
    named = find_sampling_keys(prompts)
    if named:
        warn_of_all(f"{' and '.join(named)} of training prompts do not act (in validation they do); rewards get them")
    tested = [(one, _open_validation_set(one, val_dataset)) for one in list_validation_sets(config)]
    val_prompts = [record for _, records in tested for record in records]
    clean_frames = expect_clean_frames(config)
    require_media((*prompts, *val_prompts), clean_frames, context)  # loading the model takes long
    rewards = make_rewards(config, reward_fns, validation=False, prompts=list_sent(config, prompts))
    val_rewards = [_make_validation_rewards(one, records, reward_fns, val_reward_fns) for one, records in tested]
    model = build_model(config, context, rest_on_cpu=job.cached_text)
    for key in latents_keys(config):
        model.check_reward_latents(key)
    model.warns_of_cuts = context.is_main
    if context.is_main:
        model.warn_about_truncation(_name_prompts(prompts), "prompts")
        model.warn_about_truncation(_name_prompts(val_prompts), "validation prompts")
    require_counted_media((*prompts, *val_prompts), model, context, clean_frames)
    encoding, held_out = Encoding(model, config), _open_held_out(config, job)
    if encoding.text_cache is not None:
        encoding.keep_texts(_list_texts(config, prompts, tested, held_out), context)
    parts = Parts(
        model=model,
        prompts=prompts,
        rewards=rewards,
        encode=_choose_encode(config, encoding),
        validation=[
            LoadedSet(one, records, _choose_encode(one.config, encoding), own)
            for (one, records), own in zip(tested, val_rewards, strict=True)
        ],
        held_out=None if held_out is None else _encode_held_out(held_out, model, encoding),
        data_loss=_data_loss(config, job, context, model, encoding),
        export=lambda: prepare_export(model, keep=context.is_main),
    )
    task = OnlineTask(config, context, build_algorithm(config), parts)
    load_teachers(config, model, task.policies)
    return task


def list_sent(config: Config, prompts: Sequence[PromptRecord]) -> list[tuple[str, Mapping[str, Any]]]:
    """Where each training prompt stands and its metadata, of the sets whose rewards ask the reward service."""
    sets = online_table(config).dataset.sets
    asked = [asks_service(config, validation=False, names=one.rewards or ()) for one in sets]
    return locate_metadata([record for record in prompts if not sets or asked[record.prompt_set]])


def _open_validation_set(one: ValidationSet, val_dataset: Any) -> list[PromptRecord]:
    """The prompts of a validation set: those that the script gives for its configuration."""
    try:
        return choose_prompts(_records(open_dataset(val_dataset, one.config, "val_dataset")), one.config)
    except UserError as error:
        raise UserError(one.locate(str(error))) from error


def _make_validation_rewards(
    one: ValidationSet,
    records: Sequence[PromptRecord],
    reward_fns: RewardFns | None,
    val_reward_fns: RewardFns | None,
) -> Rewards:
    located = locate_metadata(records)
    try:
        return make_rewards(one.config, reward_fns, val_reward_fns, validation=True, names=one.rewards, prompts=located)
    except UserError as error:
        raise UserError(one.locate(str(error))) from error


def _choose_encode(config: Config, encoding: Encoding) -> Encode:
    """With the negative prompts where the configuration samples with guidance."""
    guided = config.policy.diffusers.sample.guidance_scale > 1.0
    return lambda texts, negatives: encoding.conditions(texts, negatives if guided else None)


def _records(dataset: Sequence[Any]) -> list[PromptRecord]:
    return [to_prompt_record(dataset[i], i) for i in range(len(dataset))]


def _list_texts(
    config: Config,
    prompts: Sequence[PromptRecord],
    tested: Sequence[tuple[ValidationSet, Sequence[PromptRecord]]],
    held_out: Sequence[Item] | None,
) -> dict[Sides | None, list[TextPair]]:
    """What the run will encode, by the size of its samples: the prompts that it takes, those of validation and of the
    guard, and their negative prompts."""
    stream = SizedPrompts(config, prompts, plan_online(config).items).stream
    taken = find_items(stream, count_steps(stream, config))
    indices: dict[Sides | None, Sequence[int]] = {None: taken}
    if isinstance(stream, BucketStream):
        wanted = set(taken)
        indices = {bucket.size: [i for i in bucket.members if i in wanted] for bucket in stream.buckets}
    elif config.policy.diffusers.buckets is not None:  # each step draws one
        indices = dict.fromkeys(sorted(config.policy.diffusers.training_sizes), taken)
    guided = config.policy.diffusers.sample.guidance_scale > 1.0
    texts: dict[Sides | None, list[TextPair]] = {
        size: [(prompts[index].prompt, "" if guided else None) for index in own] for size, own in indices.items()
    }
    usual = None if None in texts else config.policy.diffusers.inference_size
    for one, records in tested:
        with_negatives = one.config.policy.diffusers.sample.guidance_scale > 1.0
        pairs = [(record.prompt, record.negative_prompt if with_negatives else None) for record in records]
        texts.setdefault(one.size or usual, []).extend(pairs)
    guard = _list_guard_texts(online_table(config), prompts, held_out)
    texts.setdefault(usual, []).extend((text, "" if guided else None) for text in guard)
    return texts


def _list_guard_texts(
    job: GrpoPolicyConfig, prompts: Sequence[PromptRecord], held_out: Sequence[Item] | None
) -> list[str]:
    """The prompts that the guard measures with, see `GuardProbe`."""
    guard = job.reward_hacking_guard
    if not guard.enable:
        return []
    known = interleave_sets(prompts)
    texts = [sample.prompt for sample in pick_diversity_samples(known, guard.samples)]
    if held_out is None:
        return texts + [record.prompt for record in known[: guard.samples]]
    return texts + [item.prompt for item in held_out]


def _name_prompts(records: Sequence[PromptRecord]) -> list[tuple[str, str]]:
    return [(repr(record.prompt[:40]), record.prompt) for record in records]


def _open_held_out(config: Config, job: GrpoPolicyConfig) -> list[Item] | None:
    """The pairs of ``reward_hacking_guard.local_dir``; None: none are named."""
    guard = job.reward_hacking_guard
    if not guard.enable or not guard.local_dir:
        return None
    pairs = LocalPairs.of_config(guard.local_dir, config)
    return [to_item(pairs[i], i) for i in range(min(guard.samples, len(pairs)))]


def _encode_held_out(items: Sequence[Item], model: PipelineModel, encoding: Encoding) -> HeldOut:
    """Their latents, encoded once."""
    source = digest_texts(*(hashlib.sha256(item.visual.numpy().tobytes()).hexdigest() for item in items))
    prompts = tuple(_give_own(model, item, number) for number, item in enumerate(items))
    return HeldOut(encoding.latents(items).cpu(), prompts, source)


def _give_own(model: PipelineModel, item: Item, number: int) -> PromptKey:
    """A held-out pair's prompt with as many of its own frames as the model may be given."""
    _, most = model.conditional_frames
    if most == 0:
        return item.prompt
    return join_key(item.prompt, choose_own(item, f"held-out {number}", most, model.count_given(most)))


def _data_loss(
    config: Config, job: GrpoPolicyConfig, context: Context, model: PipelineModel, encoding: Encoding
) -> DataLoss | None:
    """(training step, number of the optimiser step in it, trained levels, start noise of the step's rollouts) -> this
    rank's shares of the mean loss of real samples, one for each micro-batch."""
    term = job.data_term
    if term.beta == 0.0:
        return None
    if term.batch_size % context.dp_size:
        raise UserError(
            f"train.train_policy.data_term.batch_size: found {term.batch_size}; allowed: a multiple of the "
            f"{context.dp_size} data parallel ranks"
        )
    if term.noise == "rollout" and not takes_start_noise(model):
        raise UserError(
            f'train.train_policy.data_term.noise: found "rollout"; allowed: "fresh" with {type(model).__name__}, whose '
            "pipeline_with_logprob takes no latents and draws its start noise itself"
        )
    pairs = LocalPairs.of_config(term.local_dir, config)
    if len(pairs) < term.batch_size:
        raise UserError(
            f"train.train_policy.data_term.batch_size: found {term.batch_size}; allowed: at most the {len(pairs)} "
            f"pairs in {term.local_dir}"
        )
    readable = Readable(pairs, model.build_token_counters())
    stream = MapStream(len(pairs), term.batch_size, job.dataloader_seed)
    noising = Noising(model, encoding, config)
    skipped = Skipped(len(pairs), job.max_skipped_frac)
    per_step = plan_online(config).optimizer_steps

    def losses(step: int, number: int, levels: Level, start: StartNoise) -> Iterator[Tensor]:
        index = step * per_step + number
        batches = load_batches(
            readable, stream, index, index + 1, rank=context.dp_rank, world_size=context.dp_size, skipped=skipped
        )
        own = next(batches)
        parts = list(_prepare_parts(noising, own, config))
        times = len(levels.sigma) if term.per_step else 1
        for time in range(times):
            for ids, prepared in parts:
                part = prepared
                if time > 0:
                    part = noising.redraw(part, f"data_term/{time}", 0, ids)
                if term.noise == "rollout":
                    drawn = start([sample_id % term.batch_size for sample_id in ids])
                    part = _renoise(part, model.pack_noise(drawn.to(part.clean.device)))
                level = _data_levels(config, levels, ids, time)
                if config.train.rank_invariant:  # each is a forward pass by itself
                    torch.manual_seed(randomness.torch_seed(config.train.seed, "dropout/data", index, time, *ids))
                loss_sum, _ = part.loss(model) if level is None else part.loss_at(model, level)
                model.num_evaluations += 2 * len(part.clean)  # of the backward pass
                yield loss_sum / (term.batch_size * times)

    return losses


def _prepare_parts(noising: Noising, own: Batch, config: Config) -> Iterator[tuple[list[int], NoisedSamples]]:
    """A rank's real samples, encoded in one go or one at a time, in micro-batches with the samples' ids."""
    job, count = online_table(config), len(own.items)
    ids = [position.sample_id for position in own.positions]
    at_once = 1 if config.train.rank_invariant else max(count, 1)
    for first in range(0, count, at_once):
        some = ids[first : first + at_once]
        whole = noising.prepare("data_term", 0, some, own.items[first : first + at_once], job.caption_dropout)
        for begin in range(0, len(some), job.mini_batch):
            which = slice(begin, begin + job.mini_batch)
            yield some[which], whole.rows(which)


def _renoise(samples: NoisedSamples, noise: Tensor) -> NoisedSamples:
    """The same samples with the start noise of rollouts."""
    if noise.shape != samples.clean.shape:
        raise UserError(
            f'train.train_policy.data_term.noise: found "rollout"; allowed: "fresh", as latents of real samples are '
            f"{tuple(samples.clean.shape[1:])} and the noise of rollouts is {tuple(noise.shape[1:])}"
        )
    return replace(samples, noise=noise.to(samples.clean.dtype))


def _data_levels(config: Config, levels: Level, ids: Sequence[int], time: int) -> Level | None:
    """Of real samples that are trained on for the ``time``-th time: one of the trained levels ``[K]`` each, or, once
    per level, all at the same; None: as supervised fine-tuning draws them."""
    term = online_table(config).data_term
    if term.levels == "training":
        return None
    if term.per_step:
        return levels.rows(time).expand(len(ids))
    drawn = randomness.uniform(config.train.seed, "data_term/step", 0, ids)
    return levels.rows((drawn * len(levels.sigma)).long())
