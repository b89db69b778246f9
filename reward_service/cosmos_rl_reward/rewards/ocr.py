"""Does the image show the text its prompt asks for in quotes? PP-OCR through RapidOCR, on the CPU or a GPU."""

from __future__ import annotations

import os
from importlib import metadata as distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from cosmos_rl_reward.handler import BaseRewardHandler, NotReady, RewardRegistry
from cosmos_rl_reward.handler.base import digest
from cosmos_rl_reward.rewards import ocr_scoring
from cosmos_rl_reward.rewards.samples import SampleError, as_images, get_per_sample, score_samples


@RewardRegistry.register()
class OcrReward(BaseRewardHandler):
    """Score in [0, 1]: 1 when the quoted text is in the image, ignoring case and spaces, else by edit distance.

    Options:
        normalisation: ``"floor0"`` or ``"upstream"`` (see ``ocr_scoring.ocr_score``; the latter also takes only the
            first ASCII-quoted span).
        min_confidence: lines at or below it are left out.
        max_side: images are scaled down to this for the text detector.
        threads: of the recogniser, per worker; 0 = as many as there are cores, at most 4.
    """

    reward_name = "ocr"
    array_type = "numpy"
    media_types = ("image",)
    mergeable = True
    score_keys = ("ocr_reward", "edit_similarity", "exact_match", "substring_match", "char_iou", "ocr_text")
    OPTIONS: ClassVar[dict[str, Any]] = {
        "normalisation": "floor0",
        "min_confidence": 0.0,
        "max_side": 640,
        "threads": 0,
    }

    def set_up(self) -> None:
        """Load the recogniser that comes with the ``rapidocr`` wheel; nothing is downloaded."""
        if self.options["normalisation"] not in ("floor0", "upstream"):
            raise NotReady(
                f"reward_args.options.normalisation: {self.options['normalisation']!r} is not 'floor0' or 'upstream'"
            )
        if find_spec("rapidocr") is None or find_spec("onnxruntime") is None:
            raise NotReady("packages rapidocr and onnxruntime are not installed; pip install rapidocr onnxruntime")
        self._engines: dict[bool, Any] = {}
        self._engine(self.device.startswith("cuda"))
        models = Path(str(find_spec("rapidocr").origin)).parent / "models"  # type: ignore[union-attr]
        self.model_digest = digest(sorted(models.glob("*.onnx")))

    def _engine(self, on_gpu: bool) -> Any:
        """The recogniser for one device setting, made at first use."""
        if on_gpu not in self._engines:
            import onnxruntime
            from rapidocr import RapidOCR

            if on_gpu and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
                raise NotReady("ocr on a GPU needs the package onnxruntime-gpu in place of onnxruntime")
            threads = int(self.options["threads"]) or min(4, os.cpu_count() or 1)
            self._engines[on_gpu] = RapidOCR(
                params={
                    "Global.use_cls": False,  # upright text only: the angle classifier costs time and flips short words
                    "Global.text_score": 0.0,
                    "Global.max_side_len": int(self.options["max_side"]),
                    "Global.log_level": "error",
                    "Det.limit_side_len": int(self.options["max_side"]),
                    "Det.limit_type": "max",
                    "EngineConfig.onnxruntime.intra_op_num_threads": threads,
                    "EngineConfig.onnxruntime.use_cuda": on_gpu,
                }
            )
        return self._engines[on_gpu]

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        """See ``BaseRewardHandler.calculate_reward``. ``metadata.ocr_use_gpu`` overrides the device's setting."""
        images = as_images(images)
        prompts = get_per_sample(metadata, "prompts", len(images))
        upstream = self.options["normalisation"] == "upstream"
        on_gpu, warning = bool(metadata.get("ocr_use_gpu", self.device.startswith("cuda"))), ""
        try:
            engine = self._engine(on_gpu)
        except NotReady as error:
            engine, warning = self._engine(False), f"metadata.ocr_use_gpu: ocr runs on the CPU here ({error})"

        def score(index: int) -> dict[str, Any]:
            target = (ocr_scoring.find_first_quoted if upstream else ocr_scoring.find_quoted_text)(prompts[index])
            if not target or not ocr_scoring.normalize_text(target):
                raise SampleError(f"no quoted text in the prompt {prompts[index][:80]!r}")
            answer = engine(np.ascontiguousarray(images[index][:, :, ::-1]))  # RGB -> BGR
            lines = zip(answer.txts or (), answer.scores or (), strict=True)
            text = ocr_scoring.join_lines(lines, float(self.options["min_confidence"]))
            value = ocr_scoring.ocr_score(target, text, upstream=upstream)
            return {"ocr_reward": value, **ocr_scoring.diagnostics(target, text), "ocr_text": text}

        result = score_samples(self.score_keys, len(images), score)
        return {**result, "warning": warning} if warning else result

    def probes(self) -> list[tuple[np.ndarray, dict[str, Any]]]:
        """The word HELLO, and an empty image."""
        blank = Image.new("RGB", (256, 96), "white")
        written = blank.copy()
        ImageDraw.Draw(written).text((30, 20), "HELLO", fill="black", font=ImageFont.load_default(size=48))
        return [(np.array(image)[None], {"prompts": ['a sign "HELLO"']}) for image in (written, blank)]

    def provenance(self) -> dict[str, Any]:
        """Adds the recogniser's version."""
        return {**super().provenance(), "engine": f"rapidocr {distributions.version('rapidocr')}"}
