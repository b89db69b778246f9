"""Pictures and prompts -> latents and conditions, through the disk caches when they are on."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from cosmos_rl.data.cache import TensorCache, files_digest
from cosmos_rl.data.items import Item
from cosmos_rl.distributed.memory import memory_phase
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.model.diffusers import DiffuserModel
from cosmos_rl.policy.model.diffusers.cond import Cond


class Encoding:
    """The frozen encoders of a model.

    With a cache every picture and every text is encoded by itself, so that its bits do not depend on which others were
    missing at the same time: a resumed run finds what the undisturbed one computed.
    """

    def __init__(self, model: DiffuserModel, config: Config) -> None:
        self._model = model
        self._size = config.policy.diffusers.inference_size
        job = config.train.train_policy
        self._at_once = job.mini_batch
        self.latent_cache: TensorCache | None = None
        self.text_cache: TensorCache | None = None
        if not job.cached_latents and not job.cached_text:
            return
        folder = Path(job.cache.dir or os.environ.get("COSMOS_CACHE") or Path(config.train.output_dir) / "cache")
        bound = int(job.cache.max_gb * 2**30)
        base = model.base_folder
        if job.cached_latents:
            about = f"{files_digest(base / 'vae')}/{model.vae.dtype}/{self._size}/mean"
            self.latent_cache = TensorCache(folder.expanduser(), "latents", about, bound)
        if job.cached_text:
            parts = sorted(p for p in base.iterdir() if p.name.startswith(("text_encoder", "tokenizer")))
            digests = "/".join(files_digest(part) for part in parts)
            diffusers = config.policy.diffusers
            about = f"{digests}/{diffusers.dtype}/{model.param_dtype}/{diffusers.max_prompt_length}"
            self.text_cache = TensorCache(folder.expanduser(), "text", about, bound)

    @memory_phase("encoding")
    def latents(self, items: Sequence[Item]) -> Tensor:
        """Latents ``[B, C, ...]`` float32 on the device."""
        if self.latent_cache is None:
            return self._model.encode_visuals([i.visual for i in items], *self._size, at_once=self._at_once)
        rows = [self._cached_latent(self.latent_cache, item.visual) for item in items]
        return torch.stack(rows).to(self._model.device)

    def _cached_latent(self, cache: TensorCache, visual: Tensor) -> Tensor:
        key = hashlib.blake2b(visual.numpy().tobytes(), digest_size=16).hexdigest() + str(tuple(visual.shape))
        found = cache.get(key)
        if found is None:
            found = cache.put(key, {"latent": self._model.encode_visuals([visual], *self._size)[0]})
        return found["latent"]

    @memory_phase("encoding")
    def conditions(self, prompts: Sequence[str], negative: str | None = None) -> Cond:
        """Conditions of B prompts on the device; ``negative`` is the text of their guidance twin."""
        if self.text_cache is None:
            return self._model.encode_prompts(prompts, negative)
        twin = None if negative is None else self._cached_texts(self.text_cache, [negative] * len(prompts))
        return Cond(text=self._cached_texts(self.text_cache, prompts), negative=twin)

    def _cached_texts(self, cache: TensorCache, prompts: Sequence[str]) -> dict[str, Tensor]:
        distinct = {prompt: self._cached_text(cache, prompt) for prompt in dict.fromkeys(prompts)}
        names = next(iter(distinct.values())).keys()
        text = {name: torch.cat([distinct[prompt][name] for prompt in prompts]) for name in names}
        return {name: value.to(self._model.device) for name, value in text.items()}

    def _cached_text(self, cache: TensorCache, prompt: str) -> Mapping[str, Tensor]:
        found = cache.get(prompt)
        return found if found is not None else cache.put(prompt, self._model.encode_prompts([prompt]).text)


Encode = Callable[[Sequence[str]], Cond]


class PromptConditions:
    """The conditions of a step's prompts: each distinct prompt is encoded once, whoever asks for it."""

    def __init__(self, encode: Encode) -> None:
        """``encode``: distinct prompts -> their conditions on the device."""
        self._encode = encode
        self._place: dict[str, int] = {}
        self._cond: Cond | None = None

    def forget(self) -> None:
        """Free what the last step needed."""
        self._place, self._cond = {}, None

    def prepare(self, prompts: Sequence[str]) -> None:
        """Encode those that are new, in one go."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._place]
        if not new:
            return
        found = self._encode(new)
        self._cond = found if self._cond is None else joined(self._cond, found)
        self._place |= {prompt: len(self._place) + i for i, prompt in enumerate(new)}

    def places(self, prompts: Sequence[str]) -> Tensor:
        """int64 ``[N]``: where each prompt's conditions stand in ``all()``."""
        self.prepare(prompts)
        return torch.tensor([self._place[prompt] for prompt in prompts])

    def all(self) -> Cond:
        """The conditions of all prompts since the last ``forget``."""
        assert self._cond is not None, "no prompt was encoded"
        return self._cond

    def __call__(self, prompts: Sequence[str]) -> Cond:
        """Conditions of N prompts, repeated ones too."""
        places = self.places(prompts)
        return self.all().rows(places)


def joined(first: Cond, second: Cond) -> Cond:
    """The samples of both."""
    text = {k: torch.cat([v, second.text[k]]) for k, v in first.text.items()}
    negative = None
    if first.negative is not None and second.negative is not None:
        negative = {k: torch.cat([v, second.negative[k]]) for k, v in first.negative.items()}
    mask = None
    if first.element_mask is not None and second.element_mask is not None:
        mask = torch.cat([first.element_mask, second.element_mask])
    return Cond(text, negative, mask)
