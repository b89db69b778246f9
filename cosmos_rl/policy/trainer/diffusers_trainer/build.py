"""From a configuration to a fine-tuning task: pipeline, captioned images, held-out pairs or validation prompts."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cosmos_rl.data.bucket_stream import BucketStream
from cosmos_rl.data.cached_latents import CachedLatents
from cosmos_rl.data.given import list_edited
from cosmos_rl.data.items import BadSample, Item, Part, Readable, list_captions
from cosmos_rl.data.picture_sizes import (
    Measured,
    describe_buckets,
    describe_cuts,
    measure_all,
    measure_some,
    name_pictures,
)
from cosmos_rl.data.prompts import PromptRecord, find_unused_keys, to_prompt_record
from cosmos_rl.data.streams import MapStream, Stream, find_items
from cosmos_rl.data.subsets import choose_indices
from cosmos_rl.data.text_lengths import Named
from cosmos_rl.distributed.context import Context
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.buckets import Sides
from cosmos_rl.policy.config.plan import plan_sft
from cosmos_rl.policy.config.validation_sets import ValidationSet, list_validation_sets
from cosmos_rl.policy.trainer.base import count_steps
from cosmos_rl.policy.trainer.diffusers_trainer.buckets import Buckets, find_buckets
from cosmos_rl.policy.trainer.diffusers_trainer.common import (
    build_model,
    choose_prompts,
    expect_clean_frames,
    open_dataset,
    prepare_export,
    require_counted_media,
    require_media,
)
from cosmos_rl.policy.trainer.diffusers_trainer.encoding import Encoding, TextPair
from cosmos_rl.policy.trainer.diffusers_trainer.noising import Noising
from cosmos_rl.policy.trainer.diffusers_trainer.sft_trainer import SftParts, SFTTrainer
from cosmos_rl.policy.trainer.diffusers_trainer.validation import TestedSet
from cosmos_rl.utils.logging import logger, warn_of_all


def build_sft(
    config: Config,
    context: Context,
    *,
    dataset: Any,
    val_dataset: Any = None,
    trainer: type[SFTTrainer] = SFTTrainer,
) -> SFTTrainer:
    """Load everything that ``config`` names.

    Args:
        trainer: the class of the task, for one that overrides methods of it.

    Raises:
        UserError: data or model do not fit the configuration.
    """
    job = config.train.train_policy
    pairs, opened = open_dataset(dataset, config, "dataset"), list[_OpenedSet]()
    for one in list_validation_sets(config):
        pairs, own = _open_set(one, pairs, val_dataset)
        opened.append(own)
    clean_frames, records = expect_clean_frames(config), [record for own in opened for record in own.records]
    edited = []
    if not config.policy.diffusers.is_video:  # videos have their first frames
        edited = [*list_edited(pairs), *(one for own in opened for one in list_edited(own.pairs))]
    require_media([*edited, *records], clean_frames, context)  # loading the model takes long
    trained = find_buckets(pairs, config, context)
    tested = [None if own.pairs is None else find_buckets(own.pairs, config, context) for own in opened]
    stream = _pair_stream(config, len(pairs), trained)
    model = build_model(config, context, rest_on_cpu=job.cached_latents or job.cached_text)
    model.warns_of_cuts = context.is_main
    if context.is_main:
        _report_sizes(config, pairs, stream)
        model.warn_about_truncation(list_captions(pairs), "captions")
        for own in opened:
            model.warn_about_truncation(own.captions, f"validation captions {own.chosen.label}".rstrip())
    require_counted_media(records, model, context, clean_frames)
    encoders, encoding = model.build_token_counters(), Encoding(model, config)
    if encoding.text_cache is not None:
        held_out = [(own.pairs, sizes) for own, sizes in zip(opened, tested, strict=True)]
        encoding.keep_texts(_list_texts(config, stream, (pairs, trained), held_out), context)
    if encoding.latent_cache is not None and model.conditional_frames[1] == 0:  # else the first frames are needed too
        pairs = CachedLatents(pairs, encoding.latent_cache)
    parts = SftParts(
        model=model,
        pairs=Readable(pairs, encoders),
        stream=stream,
        noising=Noising(model, encoding, config),
        validation=[own.finish(sizes, encoders) for own, sizes in zip(opened, tested, strict=True)],
        buckets=trained,
        export=lambda: prepare_export(model, keep=context.is_main),
    )
    return trainer(config, context, parts)


@dataclass(frozen=True)
class _OpenedSet:
    """A validation set before the model is there."""

    chosen: ValidationSet
    pairs: Any = None
    records: Sequence[PromptRecord] = ()

    @property
    def captions(self) -> list[Named]:
        """Its texts with what messages call them."""
        return [(repr(one.prompt[:40]), one.prompt) for one in self.records] or list(list_captions(self.pairs))

    def finish(self, buckets: Buckets | None, encoders: Any) -> TestedSet:
        """What the trainer takes."""
        pairs = None if self.pairs is None else Readable(self.pairs, encoders)
        return TestedSet(self.chosen, pairs, self.records, buckets)


def _open_set(one: ValidationSet, pairs: Any, val_dataset: Any) -> tuple[Any, _OpenedSet]:
    """The training data that is left, and the validation set."""
    try:
        pairs, held_out = _hold_out(one.config, pairs, val_dataset)
        records = _read_validation_prompts(held_out, one.config)
    except UserError as error:
        raise UserError(one.locate(str(error))) from error
    if records is not None:
        return pairs, _OpenedSet(one, records=records)
    return pairs, _OpenedSet(one, _choose_pairs(held_out, one.config))


def _report_sizes(config: Config, pairs: Any, stream: MapStream | BucketStream) -> None:
    """What becomes of pictures of several sizes, where the data set knows their files."""
    measure = getattr(pairs, "measure", None)
    noun, sizes = name_pictures(config), config.policy.diffusers.training_sizes
    if isinstance(stream, BucketStream):
        counts = ", ".join(f"{b.size[0]} x {b.size[1]}: {len(b.members)}" for b in stream.buckets)
        lines = [f"samples in buckets (height x width): {counts}"]
        if measure is not None:
            found = measure_all(len(pairs), measure)
            lines = describe_buckets([one for one in found if isinstance(one, Measured)], sizes, noun)
        for line in lines:
            logger.info(line)
        waiting = stream.count_waiting(config.train.epoch)
        if waiting:
            logger.info(
                f"{waiting} samples of the last of {config.train.epoch} epochs do not fill a step of their size"
            )
    if measure is not None:
        in_buckets = isinstance(stream, BucketStream)
        line = describe_cuts(measure_some(len(pairs), measure), sizes, len(pairs), noun, in_buckets=in_buckets)
        if line:
            warn_of_all(line)


def _list_texts(
    config: Config,
    stream: Stream,
    training: tuple[Any, Buckets | None],
    validation: Sequence[tuple[Any, Buckets | None]],
) -> dict[Sides | None, list[TextPair]]:
    """What the run will encode of data sets that know their captions, by the size of its samples.

    Args:
        training: a data set and its sizes.
        validation: the same of each validation set.
    """
    texts = [*_locate_captions(*training, set(find_items(stream, count_steps(stream, config))))]
    texts += [found for one in validation for found in _locate_captions(*one)]
    if config.train.train_policy.caption_dropout > 0.0:
        sizes: list[Sides | None] = [None]
        if training[1] is not None:
            sizes = [size for size, _ in training[1].split()]
        texts += [(size, "") for size in sizes]
    found: dict[Sides | None, list[TextPair]] = {}
    for size, text in texts:
        found.setdefault(size, []).append((text, None))
    return found


def _locate_captions(
    data: Any, buckets: Buckets | None, taken: Collection[int] | None = None
) -> Iterator[tuple[Sides | None, str]]:
    """(size, caption) of the elements that are taken, None: of all; those that cannot be read have no size."""
    for index, (_, caption) in enumerate(list_captions(data)):
        if taken is not None and index not in taken:
            continue
        if buckets is None:
            yield None, caption
        elif buckets.sizes[index] is not None:
            yield buckets.sizes[index], caption


def _hold_out(config: Config, pairs: Any, val_dataset: Any) -> tuple[Any, Any]:
    """Training and validation data: what is given, else the first ``dataset.test_size`` training samples, taken out."""
    share = config.train.train_policy.dataset.test_size
    if share is None or config.validation.dataset.local_dir:
        return pairs, open_dataset(val_dataset, config, "val_dataset")
    if callable(val_dataset) and not hasattr(val_dataset, "__getitem__"):
        val_dataset = val_dataset(config)
    if val_dataset is not None:
        raise UserError(
            f"train.train_policy.dataset.test_size = {share} holds out training samples, and the script gives a "
            "val_dataset: unset one of them, or set validation.dataset.local_dir, then val_dataset counts"
        )
    length = len(pairs)
    if isinstance(share, int):
        count = share
    else:
        count = round(share * length)
    if not 0 < count < length:
        raise UserError(
            f"train.train_policy.dataset.test_size = {share}: takes {count} of {length} samples; it must leave "
            "some for training and some for validation"
        )
    return Part(pairs, count, length), Part(pairs, 0, count)


def _choose_pairs(held_out: Any, config: Config) -> Any:
    """Those of the held-out pairs that `validation.dataset` takes."""
    dataset = config.validation.dataset
    if dataset.limit is None or dataset.limit >= len(held_out):
        return held_out
    return Part(held_out, chosen=choose_indices(len(held_out), dataset.limit, spread=dataset.spread))


def _read_validation_prompts(data: Sequence[Any], config: Config) -> list[PromptRecord] | None:
    """The validation prompts; None where validation has pairs."""
    try:
        first = data[0]
    except BadSample:  # an image, named when its turn comes
        return None
    if isinstance(first, Item) or (isinstance(first, Mapping) and "visual" in first):
        return None
    records = [to_prompt_record(raw, i) for i, raw in enumerate(getattr(data, "records", data))]
    records = choose_prompts(records, config)
    unused = find_unused_keys(records)
    if unused:
        warn_of_all(f"validation prompts: keys of rows that have no effect: {', '.join(unused)}")
    return records


def _pair_stream(config: Config, length: int, buckets: Buckets | None) -> MapStream | BucketStream:
    """Which pair is where in the run."""
    job, key = config.train.train_policy, "train.global_batch_size"
    batch = plan_sft(config).total
    options = {"shuffle": job.dataloader_shuffle, "drop_last": job.dataloader_drop_last}
    if buckets is not None:
        stream = BucketStream.of_sizes(buckets.sizes, batch, job.dataloader_seed, **options)
        stream.require_steps(config.train.epoch)
        return stream
    if config.train.global_batch_size is None:
        key = "train.train_batch_per_replica x ranks"
    return MapStream(length, batch, job.dataloader_seed, **options, batch_key=key)
