"""VideoReward of VideoAlign (the reward of DanceGRPO): visual quality, motion quality, text alignment of a video."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cosmos_rl_reward.handler import BaseRewardHandler, NotReady, RewardRegistry
from cosmos_rl_reward.handler.base import digest
from cosmos_rl_reward.rewards import special_tokens, video_frames
from cosmos_rl_reward.rewards.samples import as_videos, get_frame_rate, get_per_sample, score_samples
from cosmos_rl_reward.rewards.templates import read_constants, read_template
from cosmos_rl_reward.rewards.weights import (
    MODEL_FILES,
    TOKENIZER_FILES,
    choose_dtype,
    download_text,
    find_folder,
    load_state,
    require_packages,
)

_MODEL = "KwaiVGI/VideoReward"
_DIMENSIONS = ("VQ", "MQ", "TA")
_TOKENS = [f"<|{name}_reward|>" for name in _DIMENSIONS]
_MIN_PIXELS = 128 * 28 * 28
_TEMPLATE = "DETAILED_PROMPT_WITH_SPECIAL_TOKEN"
_TEMPLATE_FILE = "prompt_template.py"
_TEMPLATE_URL = (
    "https://raw.githubusercontent.com/KwaiVGI/VideoAlign/3e5ebc600aebc4d28300e9132b0a23ee8e1bc47c/prompt_template.py"
)


@RewardRegistry.register()
class DanceGRPO(BaseRewardHandler):
    """Three standardised ratings and their sum, each usually -5 to 5.

    ``model_path`` is a folder like the published one (or its name on the hub): ``model_config.json`` and
    ``checkpoint-N/model.pth``, or ``adapter_model.safetensors`` with ``non_lora_state_dict.pth``. Mean and standard
    deviation of each rating, frame rate and size come from ``model_config.json`` and from nowhere else.

    Options:
        template: ``prompt_template.py`` of VideoAlign (its text is read, no code is run), or a text file with
            ``{text_prompt}`` and the three special tokens; empty = a file of that name in the model's folder, else in
            ``<download_path>/dance_grpo``, where ``prepare`` puts it.
        base_model: folder or hub name of the Qwen2-VL it was trained from; empty = what ``model_config.json`` says.
    """

    reward_name = "dance_grpo"
    NEEDS_LATENT_DECODER = True
    media_types = ("video",)
    required_metadata = ("video_infos",)
    score_keys = ("vq_reward", "mq_reward", "ta_reward", "overall_reward")
    OPTIONS: ClassVar[dict[str, Any]] = {"template": "", "base_model": ""}

    def fetch(self, offline: bool) -> str | None:
        require_packages("transformers", "torchvision")
        self._folder = find_folder(
            self.model_path or _MODEL, (*MODEL_FILES, "*.pth"), offline=offline, published=_MODEL
        )
        self._settings = _settings(self._folder)
        self._checkpoint = _find_newest_checkpoint(self._folder)
        self._template = self._read_template(offline)
        base = self.options["base_model"] or self._settings["model_config"]["model_name_or_path"]
        whole = (self._checkpoint / "model.pth").is_file()
        self._base = find_folder(base, TOKENIZER_FILES if whole else MODEL_FILES, offline=offline)
        return f"dance_grpo: {self._checkpoint}"

    def _read_template(self, offline: bool) -> str:
        local = self._folder / _TEMPLATE_FILE
        downloaded = Path(self.download_path, "dance_grpo", _TEMPLATE_FILE)
        path = Path(self.options["template"] or (local if local.is_file() else downloaded))
        if path == downloaded and not path.is_file() and not offline:
            download_text(_TEMPLATE_URL, path)
        if not path.is_file():
            raise NotReady(
                f"reward_args.options.template: no file {path}; the model was trained with one fixed question, which is"
                f" in {_TEMPLATE_FILE} of the VideoAlign repository: run cosmos-rl-reward-prepare, or copy it there"
            )
        if path.suffix == ".py":
            (text,) = read_constants(path, _TEMPLATE)
        else:
            text = read_template(path)
        if "{text_prompt}" not in text or any(text.count(token) != 1 for token in _TOKENS):
            raise NotReady(f"reward_args.options.template: {path} needs {{text_prompt}} and once each {_TOKENS}")
        self._template_digest = digest([path])
        return text

    def set_up(self) -> None:
        """Load backbone, head and processor."""
        self.fetch(offline=True)  # a start never downloads
        dtype = choose_dtype(self)
        lora = self._settings.get("peft_lora_config", {})
        rank, alpha = lora.get("lora_r", 1), lora.get("lora_alpha", 1)
        scale = alpha / (rank**0.5 if lora.get("use_rslora") else rank)
        files, state = self._state()
        weights, source = special_tokens.merge_lora(state, scale), self._checkpoint
        self._model = special_tokens.SpecialTokenModel(self._base, weights, _TOKENS, dtype, self.device, source)
        self.model_digest = digest(files)

    def _state(self) -> tuple[list[Path], dict[str, Any]]:
        """Files of the checkpoint, and all weights they stand for."""
        whole = self._checkpoint / "model.pth"
        if whole.is_file():
            return [whole], load_state(whole)
        files = [self._checkpoint / "adapter_model.safetensors", self._checkpoint / "non_lora_state_dict.pth"]
        state: dict[str, Any] = {}
        for path in [*sorted(self._base.glob("*.safetensors")), *files]:
            state.update({n.removeprefix("base_model.model."): v for n, v in load_state(path).items()})
        return files, state

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        videos = as_videos(images)
        prompts = get_per_sample(metadata, "prompts", len(videos))
        infos = get_per_sample(metadata, "video_infos", len(videos))

        def score(index: int) -> dict[str, float]:
            return self._one(videos[index], prompts[index], get_frame_rate(infos, index))

        return score_samples(self.score_keys, len(videos), score)

    def _one(self, video: np.ndarray, prompt: str, video_fps: float) -> dict[str, float]:
        data, norm = self._settings["data_config"], self._settings["inference_config"]
        indices = video_frames.sample_evenly(video.shape[1], video_fps, data["fps"], number=data.get("num_frames"))
        chosen = video[:, indices].transpose(1, 0, 2, 3)
        frames = video_frames.resize_frames(chosen, _MIN_PIXELS, data["max_frame_pixels"])
        question = self._template.replace("{text_prompt}", prompt)
        raw = self._model.ask([question], "video", [frames])[0].diagonal().tolist()  # the d-th output at the d-th token
        values = [(x - norm[f"{d}_mean"]) / norm[f"{d}_std"] for x, d in zip(raw, _DIMENSIONS, strict=True)]
        return dict(zip(self.score_keys, [*values, sum(values)], strict=True))

    def provenance(self) -> dict[str, Any]:
        """Adds the template's digest and the constants of the checkpoint."""
        constants = self._settings["inference_config"]
        return {**super().provenance(), "template_digest": self._template_digest, "checkpoint_config": constants}


def _settings(folder: Path) -> dict[str, Any]:
    """``model_config.json``, checked for what scoring needs.

    Raises:
        NotReady: names what is missing.
    """
    path = folder / "model_config.json"
    if not path.is_file():
        raise NotReady(f"weights {folder}: no model_config.json")
    settings = json.loads(path.read_text(encoding="utf-8"))
    wanted = {
        "inference_config": [f"{d}_{kind}" for d in _DIMENSIONS for kind in ("mean", "std")],
        "data_config": ["fps", "max_frame_pixels"],
        "model_config": ["model_name_or_path"],
    }
    for table, keys in wanted.items():
        missing = [key for key in keys if (settings.get(table) or {}).get(key) is None]
        if missing:
            raise NotReady(f"{path}: {table} has no {', '.join(missing)}; scores cannot be made without them")
    data = settings["data_config"]
    for key, known in (("sample_type", "uniform"), ("prompt_template_type", "detailed_special")):
        if data.get(key, known) != known:
            raise NotReady(f"{path}: data_config.{key} = {data[key]!r} is not supported, only {known!r}")
    return settings


def _find_newest_checkpoint(folder: Path) -> Path:
    """The checkpoint folder with the highest step, or the folder itself."""
    steps = sorted(folder.glob("checkpoint-*"), key=lambda p: int(p.name.rpartition("-")[2]))
    chosen = steps[-1] if steps else folder
    if not any((chosen / name).is_file() for name in ("model.pth", "adapter_model.safetensors")):
        raise NotReady(f"weights {chosen}: neither model.pth nor adapter_model.safetensors")
    return chosen
