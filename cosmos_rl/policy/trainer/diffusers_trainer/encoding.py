"""Images and prompts -> latents and conditions, through the disk caches when they are on."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from cosmos_rl.data.cache import TensorCache, digest_files
from cosmos_rl.data.given import Given, GivenPrompt, PromptKey, load_given, text_of
from cosmos_rl.data.items import Item
from cosmos_rl.data.text_lengths import find_refusal
from cosmos_rl.data.texts import find_text_problem
from cosmos_rl.distributed.context import Context
from cosmos_rl.distributed.memory import memory_phase
from cosmos_rl.policy.config import CACHED_AT_ONCE, Config, images_at_once
from cosmos_rl.policy.config.buckets import Sides
from cosmos_rl.policy.model.diffusers import PipelineModel
from cosmos_rl.policy.model.diffusers.cond import Cond
from cosmos_rl.policy.model.driver.conditions import DrivenCond, MediaCond, concat_all
from cosmos_rl.policy.model.driver.contract import Medium
from cosmos_rl.policy.model.driver.model import DrivenModel
from cosmos_rl.storage.cache_folder import place_tensors
from cosmos_rl.utils.logging import logger

TextPair = tuple[str, str | None]
"""A text and what guidance leads away from; None: without guidance."""

_TEXT_PARTS = ("text_encoder", "tokenizer", "processor")


class Encoding:
    """The frozen encoders of a model.

    For a cache images and texts are encoded in batches of one size, filled up where fewer are missing. The last bits
    depend on the size of a batch and not on what else is in it: a resumed run, and any number of ranks, find what the
    undisturbed one computed, and several at once take much less time than one after the other.
    """

    def __init__(self, model: PipelineModel, config: Config) -> None:
        self._model = model
        self._config, self._job = config, config.train.train_policy
        self._by_size: dict[tuple[str, Sides | None], TensorCache] = {}
        self.latent_cache: TensorCache | None = None
        if self._job.cached_latents:
            # two classes may have the same VAE, and one packs what the other leaves as it is
            kind, vae = type(model.pipeline).__name__, digest_files(model.base_folder / "vae")
            made = f"{config.policy.diffusers.inference_size}/mean/{images_at_once(config)}"
            if config.policy.diffusers.buckets is not None:
                made = "buckets/mean"  # the keys of the entries hold the sizes
            self.latent_cache = self._open_cache("latents", f"{vae}/{kind}/{model.vae.dtype}/{made}")

    @property
    def _size(self) -> Sides:
        """Height and width that the model works on."""
        return self._model.media_size or self._config.policy.diffusers.inference_size

    def _open_cache(self, kind: str, about: str) -> TensorCache:
        job = self._job
        place = place_tensors(job.cache.dir, self._config.train.output_dir)
        advice = f"it is from {place.key}: {place.advice}"
        return TensorCache(place.folder, kind, about, int(job.cache.max_gb * 2**30), advice)

    @property
    def text_cache(self) -> TensorCache | None:
        """Of the present size, as driven pipelines may make other conditions at others; None: nothing is kept."""
        if not self._job.cached_text:
            return None
        return self._find_cache("text", self._describe_encoders)

    @property
    def _media_cache(self) -> TensorCache | None:
        model = self._model
        if not self._job.cached_latents or not isinstance(model, DrivenModel) or not model.keeps_media_apart:
            return None
        return self._find_cache("media", self._describe_media_encoders)

    def _find_cache(self, kind: str, describe: Callable[[], str]) -> TensorCache:
        key = kind, self._size if isinstance(self._model, DrivenModel) else None
        if key not in self._by_size:
            self._by_size[key] = self._open_cache(kind, describe())
        return self._by_size[key]

    def _describe_media_encoders(self) -> str:
        base = self._model.base_folder
        parts = [digest_files(base / part) for part in ("vae", "image_encoder") if (base / part).is_dir()]
        return f"{'/'.join(parts)}/{self._model.vae.dtype}/{self._describe_encoders()}"

    def _describe_encoders(self) -> str:
        """Everything other than a text that its features depend on."""
        diffusers, model = self._config.policy.diffusers, self._model
        parts = sorted(p for p in model.base_folder.iterdir() if p.name.startswith(_TEXT_PARTS))
        digests = "/".join(digest_files(part) for part in parts)
        about = f"{digests}/{diffusers.dtype}/{model.param_dtype}/{diffusers.max_prompt_length}"
        if isinstance(model, DrivenModel):
            return f"{about}/{model.text_identity()}"
        return f"{about}/{CACHED_AT_ONCE}"

    @memory_phase("encoding")
    def latents(self, items: Sequence[Item]) -> Tensor:
        """Latents ``[B, C, ...]`` float32 on the device."""
        if self.latent_cache is None:
            return self._encode_images([item.visual for item in items])
        keys = [item.source or _image_key(item.visual) for item in items]
        found = {key: item.latent for key, item in zip(keys, items, strict=True) if item.latent is not None}
        visuals = {key: item.visual for key, item in zip(keys, items, strict=True) if key not in found}

        def encode(batch: Sequence[Tensor]) -> Iterator[Mapping[str, Tensor]]:
            return ({"latent": latent} for latent in self._encode_images(batch))

        entries = _fill_from_cache(self.latent_cache, visuals, self._at_once(), encode)
        found |= {key: entry["latent"] for key, entry in entries.items()}
        return torch.stack([found[key] for key in keys]).to(self._model.device)

    def _encode_images(self, visuals: Sequence[Tensor]) -> Tensor:
        return self._model.encode_visuals(visuals, *self._size, at_once=self._at_once())

    def _at_once(self) -> int:
        return images_at_once(self._config, self._size)

    @memory_phase("encoding")
    def conditions(self, prompts: Sequence[PromptKey], negatives: Sequence[str] | None = None) -> Any:
        """Conditions of B prompts on the device, with those of their negative prompts where guidance needs them.

        Of prompts that come with a medium, those of the medium too.
        """
        cond = self._text_conditions([text_of(prompt) for prompt in prompts], negatives)
        cache = self._media_cache
        if cache is None or not any(map(_media_source, prompts)):
            return add_media(self._model, cond, prompts, self._size)
        assert isinstance(self._model, DrivenModel)
        rows = [cond.rows(slice(row, row + 1)) for row in range(len(prompts))]
        media = [self._cached_media(cache, *one) for one in zip(rows, prompts, strict=True)]
        return self._model.driver.join_media(cond, media)

    def _cached_media(self, cache: TensorCache, cond: DrivenCond, prompt: PromptKey) -> MediaCond:
        """What the pipeline makes of the medium of one prompt."""
        source, found = _media_source(prompt), None
        if source is not None:
            found = cache.get(f"{source}/{cond.guided}")
        if found is None:
            made = add_media(self._model, cond, [prompt], self._size).media
            if source is None:
                return made
            found = cache.put(f"{source}/{cond.guided}", made.to_tensors())
        return MediaCond.from_tensors(found).to(self._model.device)

    def load_medium(self, given: Given) -> Medium | None:
        """The frames that a sample is conditioned on; None: on none."""
        return load_medium(self._model, given, self._size)

    def _text_conditions(self, prompts: Sequence[str], negatives: Sequence[str] | None) -> Any:
        cache = self.text_cache
        if cache is None:
            return self._model.encode_prompts(prompts, negatives)
        if isinstance(self._model, DrivenModel):
            return _cached_conditions(self._model, cache, prompts, negatives)
        found = self._cached_texts(cache, (*prompts, *(negatives or ())))
        cond = Cond.from_tensors([found[prompt] for prompt in prompts])
        if negatives is not None:
            cond = replace(cond, negative=Cond.from_tensors([found[negative] for negative in negatives]).text)
        return cond.to(self._model.device)

    def _cached_texts(self, cache: TensorCache, texts: Sequence[str]) -> dict[str, Mapping[str, Tensor]]:
        """Features of each text, made with others in a batch of one size."""

        def encode(batch: Sequence[str]) -> Iterable[Mapping[str, Tensor]]:
            return self._model.encode_prompts(batch, each=True).to_tensors()

        return _fill_from_cache(cache, {text: text for text in texts}, CACHED_AT_ONCE, encode)

    def keep_texts(self, texts: Mapping[Sides | None, Iterable[TextPair]], context: Context) -> None:
        """Encode what the cache of texts lacks of these, so that the encoders need not come to the device again.

        Each rank encodes its share; all must call it. Texts that do not fit into the cache, or that no tokenizer
        takes, are left for when they are asked for.

        Args:
            texts: by the size at which they will be asked for; None: the configured one.
        """
        for size, pairs in texts.items():
            with self._model.at_size(size):
                self._keep_at_size(pairs, context)

    @memory_phase("encoding")
    def _keep_at_size(self, pairs: Iterable[TextPair], context: Context) -> None:
        cache = self.text_cache
        if cache is None:
            return
        keyed = self._key_texts(pairs)
        missing = cache.find_missing(keyed)
        context.barrier()  # before any rank adds some, so that the shares are of one list
        if missing:
            logger.info(f"encoding {len(missing)} texts for the cache, before training")
        fits = self._keep(cache, missing[context.rank :: context.world_size], keyed, context)
        context.barrier()
        if fits and context.world_size > 1:  # those of ranks that write to another disk
            fits = self._keep(cache, cache.find_missing(missing), keyed, context)
        if not fits:
            logger.warning(
                "train.train_policy.cache.max_gb: too little for all texts; the encoders come back for the others"
            )

    def _key_texts(self, pairs: Iterable[TextPair]) -> dict[str, TextPair]:
        """What to encode under each key of the cache."""
        readable = [pair for pair in dict.fromkeys(pairs) if self._is_readable(pair)]
        if isinstance(self._model, DrivenModel):
            return {json.dumps(pair): pair for pair in readable}
        texts = dict.fromkeys(text for pair in readable for text in pair if text is not None)
        return {text: (text, None) for text in texts}

    def _is_readable(self, pair: TextPair) -> bool:
        counters = self._model.build_token_counters()
        texts = [text for text in pair if text is not None]
        return all(find_text_problem(text) is None and find_refusal(text, counters) is None for text in texts)

    def _keep(self, cache: TensorCache, keys: Sequence[str], keyed: Mapping[str, TextPair], context: Context) -> bool:
        """Encode the texts under ``keys`` into the cache, as many as fit; whether that were all."""
        if not keys:
            return True
        with self._model.encoding_texts():
            self._encode_into(cache, keys[:CACHED_AT_ONCE], keyed)
            fitting = keys[:CACHED_AT_ONCE]
            if size := cache.size_of(keys[0]):  # else it was evicted
                fitting = keys[: CACHED_AT_ONCE + cache.free_bytes // (size * context.world_size)]
            for first in range(CACHED_AT_ONCE, len(fitting), CACHED_AT_ONCE):
                self._encode_into(cache, fitting[first : first + CACHED_AT_ONCE], keyed)
        return len(fitting) == len(keys)

    def _encode_into(self, cache: TensorCache, keys: Sequence[str], keyed: Mapping[str, TextPair]) -> None:
        if isinstance(self._model, DrivenModel):
            _cached_alone(self._model, cache, [keyed[key] for key in keys])
        else:
            self._cached_texts(cache, keys)


def _media_source(prompt: PromptKey) -> str | None:
    """What the medium of a prompt is kept under; None where nothing says which one it is."""
    if not isinstance(prompt, GivenPrompt) or prompt.given.source is None:
        return None
    return f"{prompt.given.source}/{prompt.given.clean}/{prompt.text}"


def add_media(model: PipelineModel, cond: Any, prompts: Sequence[PromptKey], size: tuple[int, int]) -> Any:
    """Conditions of the texts of B prompts, with those of the media that come with them."""
    given = [prompt.given for prompt in prompts if isinstance(prompt, GivenPrompt)]
    if not given:
        return cond
    return model.condition(cond, [load_medium(model, one, size) for one in given])


def load_medium(model: PipelineModel, given: Given, size: tuple[int, int]) -> Medium | None:
    """The frames ``size`` (height, width) that a sample is conditioned on; None: on none."""
    if given.clean == 0:
        return None
    return Medium(load_given(given, model.count_given(given.clean), *size), given.clean)


def _cached_conditions(
    model: DrivenModel, cache: TensorCache, prompts: Sequence[str], negatives: Sequence[str] | None
) -> DrivenCond:
    """Conditions of a driven pipeline, prompt by prompt, or all together where prompts alone have other lengths."""
    pairs = list(zip(prompts, negatives or [None] * len(prompts), strict=True))
    distinct = list(dict.fromkeys(pairs))
    cond = None
    if len({away == "" for _, away in distinct}) == 1:  # next to others an empty text is not the pipeline's default
        cond = concat_all(_cached_alone(model, cache, distinct))
    if cond is None:
        key = json.dumps(distinct)
        found = cache.get(key)
        if found is None:
            away = None if negatives is None else [away or "" for _, away in distinct]
            found = cache.put(key, model.encode_prompts([text for text, _ in distinct], away).to_tensors())
        cond = DrivenCond.from_tensors(found)
    return cond.to(model.device).rows(torch.tensor([distinct.index(pair) for pair in pairs]))


def _cached_alone(model: DrivenModel, cache: TensorCache, pairs: Sequence[tuple[str, str | None]]) -> list[DrivenCond]:
    """Each pair's conditions, made without any other one."""
    found = {pair: cache.get(json.dumps(pair)) for pair in pairs}
    missing = [pair for pair, entry in found.items() if entry is None]
    for pair, cond in zip(missing, model.encode_each(missing), strict=True):
        found[pair] = cache.put(json.dumps(pair), cond.to_tensors())
    return [DrivenCond.from_tensors(entry) for entry in found.values() if entry is not None]


def _image_key(visual: Tensor) -> str:
    return hashlib.blake2b(visual.numpy().tobytes(), digest_size=16).hexdigest() + str(tuple(visual.shape))


T = TypeVar("T")


def _fill_from_cache(
    cache: TensorCache,
    wanted: Mapping[str, T],
    size: int,
    encode: Callable[[Sequence[T]], Iterable[Mapping[str, Tensor]]],
) -> dict[str, Mapping[str, Tensor]]:
    """What the cache holds under the keys of ``wanted``; what is missing is encoded, ``size`` at a time, and kept."""
    found: dict[str, Mapping[str, Tensor]] = {}
    missing = []
    for key in wanted:
        entry = cache.get(key)
        if entry is None:
            missing.append(key)
        else:
            found[key] = entry
    for first in range(0, len(missing), size):
        keys = missing[first : first + size]
        batch = [wanted[key] for key in keys]
        batch += batch[-1:] * (size - len(batch))
        found |= {key: cache.put(key, entry) for key, entry in zip(keys, encode(batch), strict=False)}
    return found


Encode = Callable[[Sequence[PromptKey], Sequence[str]], Any]
"""(prompts, negative prompts) -> their conditions on the device."""


class StepConditions:
    """The conditions of a step's prompts: each distinct pair of prompt and negative prompt is encoded once.

    Make a new one for each step, so that the last one's memory is freed.
    """

    def __init__(self, encode: Encode, *, each: bool = False) -> None:
        """
        Args:
            encode: distinct pairs -> their conditions on the device.
            each: one pair at a time, so that a pair's bits do not depend on the others; then those of several different
                pairs cannot be asked for together.
        """
        self._encode = encode
        self._each: dict[tuple[PromptKey, str], Any] | None = {} if each else None
        self._index: dict[tuple[PromptKey, str], int] = {}
        self._cond: Any = None

    def encode_all(self, prompts: Sequence[PromptKey], negatives: Sequence[str] | None = None) -> None:
        """Encode those that are new, in one go or one at a time."""
        pairs = zip(prompts, negatives or [""] * len(prompts), strict=True)
        known = self._index if self._each is None else self._each
        new = [pair for pair in dict.fromkeys(pairs) if pair not in known]
        if not new:
            return
        if self._each is not None:
            self._each |= {pair: self._encode_pairs([pair]) for pair in new}
            return
        found = self._encode_pairs(new)
        self._index |= {pair: len(self._index) + i for i, pair in enumerate(new)}
        if self._cond is not None:
            found = self._cond.concat(found)
        self._cond = found if found is not None else self._encode_pairs(list(self._index))  # their lengths differ

    def _encode_pairs(self, pairs: Sequence[tuple[PromptKey, str]]) -> Any:
        return self._encode([prompt for prompt, _ in pairs], [negative for _, negative in pairs])

    def __call__(self, prompts: Sequence[PromptKey], negatives: Sequence[str] | None = None) -> Any:
        """Conditions of N prompts, repeated ones too; ``negatives`` default to the empty text.

        Raises:
            ValueError: several different prompts, where each is encoded by itself.
        """
        self.encode_all(prompts, negatives)
        pairs = list(zip(prompts, negatives or [""] * len(prompts), strict=True))
        if self._each is not None:
            if len(set(pairs)) > 1:
                raise ValueError(f"conditions of {len(set(pairs))} prompts together, which are made one at a time")
            return self._each[pairs[0]].rows(torch.zeros(len(pairs), dtype=torch.int64))
        return self._cond.rows(torch.tensor([self._index[pair] for pair in pairs]))
