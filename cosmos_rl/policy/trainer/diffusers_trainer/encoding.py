"""Images and prompts -> latents and conditions, through the disk caches when they are on."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from cosmos_rl.data.cache import TensorCache, digest_files
from cosmos_rl.data.items import Item
from cosmos_rl.distributed.memory import memory_phase
from cosmos_rl.policy.config import CACHED_AT_ONCE, Config, images_at_once
from cosmos_rl.policy.model.diffusers import DiffuserModel
from cosmos_rl.policy.model.diffusers.cond import Cond


class Encoding:
    """The frozen encoders of a model.

    For a cache images and texts are encoded in batches of one size, filled up where fewer are missing. The last bits
    depend on the size of a batch and not on what else is in it: a resumed run, and any number of ranks, find what the
    undisturbed one computed, and several at once take much less time than one after the other.
    """

    def __init__(self, model: DiffuserModel, config: Config) -> None:
        self._model = model
        self._size = config.policy.diffusers.inference_size
        job = config.train.train_policy
        self._at_once = images_at_once(config)
        self.latent_cache: TensorCache | None = None
        self.text_cache: TensorCache | None = None
        if not job.cached_latents and not job.cached_text:
            return
        folder = Path(job.cache.dir or os.environ.get("COSMOS_CACHE") or Path(config.train.output_dir) / "cache")
        bound = int(job.cache.max_gb * 2**30)
        base = model.base_folder
        if job.cached_latents:
            about = f"{digest_files(base / 'vae')}/{model.vae.dtype}/{self._size}/mean/{self._at_once}"
            self.latent_cache = TensorCache(folder.expanduser(), "latents", about, bound)
        if job.cached_text:
            parts = sorted(p for p in base.iterdir() if p.name.startswith(("text_encoder", "tokenizer")))
            digests = "/".join(digest_files(part) for part in parts)
            diffusers = config.policy.diffusers
            about = f"{digests}/{diffusers.dtype}/{model.param_dtype}/{diffusers.max_prompt_length}/{CACHED_AT_ONCE}"
            self.text_cache = TensorCache(folder.expanduser(), "text", about, bound)

    @memory_phase("encoding")
    def latents(self, items: Sequence[Item]) -> Tensor:
        """Latents ``[B, C, ...]`` float32 on the device."""
        if self.latent_cache is None:
            return self._encode_images([item.visual for item in items])
        keys = [_image_key(item.visual) for item in items]
        visuals = {key: item.visual for key, item in zip(keys, items, strict=True)}

        def encode(batch: Sequence[Tensor]) -> Iterator[Mapping[str, Tensor]]:
            return ({"latent": latent} for latent in self._encode_images(batch))

        found = _fill_from_cache(self.latent_cache, visuals, self._at_once, encode)
        return torch.stack([found[key]["latent"] for key in keys]).to(self._model.device)

    def _encode_images(self, visuals: Sequence[Tensor]) -> Tensor:
        return self._model.encode_visuals(visuals, *self._size, at_once=self._at_once)

    @memory_phase("encoding")
    def conditions(self, prompts: Sequence[str], negative: str | None = None) -> Cond:
        """Conditions of B prompts on the device; ``negative`` is the text that guidance leads away from."""
        if self.text_cache is None:
            return self._model.encode_prompts(prompts, negative)
        texts = {text: text for text in (*prompts, negative) if text is not None}

        def encode(batch: Sequence[str]) -> Iterator[Mapping[str, Tensor]]:
            rows = self._model.encode_prompts(batch, each=True).text
            return ({name: value[i : i + 1] for name, value in rows.items()} for i in range(len(batch)))

        found = _fill_from_cache(self.text_cache, texts, CACHED_AT_ONCE, encode)
        negatives = None
        if negative is not None:
            negatives = self._stack(found, [negative] * len(prompts))
        return Cond(text=self._stack(found, prompts), negative=negatives)

    def _stack(self, found: Mapping[str, Mapping[str, Tensor]], prompts: Sequence[str]) -> dict[str, Tensor]:
        names = found[prompts[0]].keys()
        text = {name: torch.cat([found[prompt][name] for prompt in prompts]) for name in names}
        return {name: value.to(self._model.device) for name, value in text.items()}


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


Encode = Callable[[Sequence[str]], Cond]


class StepConditions:
    """The conditions of a step's prompts: each distinct prompt is encoded once, whoever asks for it.

    Make a new one for each step, so that the last one's memory is freed.
    """

    def __init__(self, encode: Encode) -> None:
        """``encode``: distinct prompts -> their conditions on the device."""
        self._encode = encode
        self._index: dict[str, int] = {}
        self._cond: Cond | None = None

    def encode_all(self, prompts: Sequence[str]) -> None:
        """Encode those that are new, in one go."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._index]
        if not new:
            return
        found = self._encode(new)
        if self._cond is not None:
            found = concat_conditions(self._cond, found)
        self._cond = found
        self._index |= {prompt: len(self._index) + i for i, prompt in enumerate(new)}

    def __call__(self, prompts: Sequence[str]) -> Cond:
        """Conditions of N prompts, repeated ones too."""
        self.encode_all(prompts)
        assert self._cond is not None, "no prompts were given"
        return self._cond.rows(torch.tensor([self._index[prompt] for prompt in prompts]))


def concat_conditions(first: Cond, second: Cond) -> Cond:
    """The samples of both."""
    text = {k: torch.cat([v, second.text[k]]) for k, v in first.text.items()}
    negative = None
    if first.negative is not None and second.negative is not None:
        negative = {k: torch.cat([v, second.negative[k]]) for k, v in first.negative.items()}
    mask = None
    if first.element_mask is not None and second.element_mask is not None:
        mask = torch.cat([first.element_mask, second.element_mask])
    return Cond(text, negative, mask)
