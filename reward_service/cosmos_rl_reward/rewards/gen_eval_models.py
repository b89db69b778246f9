"""What GenEval looks with: an object detector and a zero-shot classifier of colours, both from transformers."""

from __future__ import annotations

from typing import Any

import numpy as np

from cosmos_rl_reward.handler import NotReady
from cosmos_rl_reward.rewards import clip
from cosmos_rl_reward.rewards.gen_eval_rules import COLORS, NAMES, Detection, Objects

_SPELLING = {"mouse": "computer mouse", "remote": "tv remote", "keyboard": "computer keyboard", "tvmonitor": "tv"}
_GREY = 0x99  # what lies outside an object's mask, when its colour is asked
_LEAST = 0.3  # no rule looks at less certain detections


class Detector:
    """Objects of the 80 COCO classes.

    Any transformers model that segments instances (Mask2Former, MaskFormer) or detects objects (DETR-like); the latter
    give boxes without masks.
    """

    def __init__(self, folder: str, device: str, dtype: Any) -> None:
        from transformers import (
            AutoConfig,
            AutoImageProcessor,
            AutoModelForObjectDetection,
            AutoModelForUniversalSegmentation,
        )

        config: Any = AutoConfig.from_pretrained(folder)
        self._segments = config.model_type in ("mask2former", "maskformer")
        kind: Any = AutoModelForUniversalSegmentation if self._segments else AutoModelForObjectDetection
        self._model = kind.from_pretrained(folder, dtype=dtype).to(device).eval()
        self._processor: Any = AutoImageProcessor.from_pretrained(folder)
        self._names: dict[int, Any] = {int(i): _SPELLING.get(n.lower(), n.lower()) for i, n in config.id2label.items()}
        if missing := [name for name in NAMES if name not in self._names.values()]:
            raise NotReady(
                f"gen_eval: the detector {folder} does not know {missing[:5]} ({len(missing)} of 80 classes)"
            )

    def __call__(self, image: np.ndarray) -> Objects:
        """Detections of a uint8 ``[H, W, 3]`` image by class, above the lowest confidence that any rule uses."""
        import torch

        inputs = self._processor(images=[image], return_tensors="pt").to(self._model.device)
        inputs = {k: v.to(self._model.dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        with torch.inference_mode():
            outputs = self._model(**inputs)
        size = [image.shape[:2]]
        objects: Objects = {}
        if self._segments:
            for label, confidence, mask in self._instances(outputs, size):
                if mask.any():
                    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
                    box = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
                    found = Detection(tuple(map(float, box)), confidence, mask)  # type: ignore[arg-type]
                    objects.setdefault(self._names[label], []).append(found)
            return objects
        found = self._processor.post_process_object_detection(outputs, threshold=_LEAST, target_sizes=size)[0]
        for label, confidence, box in zip(found["labels"], found["scores"], found["boxes"], strict=True):
            detection = Detection(tuple(box.float().tolist()), float(confidence))  # type: ignore[arg-type]
            objects.setdefault(self._names[int(label)], []).append(detection)
        return objects

    def _instances(self, outputs: Any, size: list[tuple[int, int]]) -> list[tuple[int, float, np.ndarray]]:
        found = self._processor.post_process_instance_segmentation(
            outputs, threshold=_LEAST, target_sizes=size, return_binary_maps=True
        )[0]
        if not found["segments_info"]:
            return []
        masks = found["segmentation"].cpu().numpy().astype(bool)
        return [(s["label_id"], s["score"], m) for s, m in zip(found["segments_info"], masks, strict=True)]


class ColorClassifier:
    """Which of ten colours an object has: CLIP's nearest of three sentences for each."""

    def __init__(self, folder: str, device: str, dtype: Any) -> None:
        from transformers import AutoTokenizer, CLIPModel

        model: Any = CLIPModel.from_pretrained(folder, dtype=dtype)
        self._model = model.to(device).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._known: dict[str, Any] = {}

    def __call__(self, image: np.ndarray, name: str, detections: list[Detection]) -> list[str]:
        """Colours of objects of the class ``name`` in a uint8 ``[H, W, 3]`` image."""
        import torch

        if not detections:
            return []
        size = self._model.config.vision_config.image_size
        crops = [clip.resize_and_crop(crop_object(image, d)[None], size, nearest_offset=True)[0] for d in detections]
        with torch.inference_mode():
            features = clip.encode_images(self._model, clip.normalize(np.stack(crops)))
            best = (features @ self._sentences(name).T).argmax(-1).tolist()
        return [COLORS[index] for index in best]

    def _sentences(self, name: str) -> Any:
        """Mean text feature of each colour, of norm 1: ``[10, D]``."""
        if name not in self._known:
            rows = []
            for color in COLORS:
                texts = [f"a photo of a {color} {name}", f"a photo of a {color}-colored {name}"]
                rows.append(clip.encode_texts(self._model, self._tokenizer, [*texts, f"a photo of a {color} object"]))
            import torch

            mean = torch.stack([row.mean(0) for row in rows])
            self._known[name] = mean / mean.norm(dim=-1, keepdim=True)
        return self._known[name]


def crop_object(image: np.ndarray, detection: Detection) -> np.ndarray:
    """The detection's box of an image, grey where its mask is not; at least one pixel."""
    left, top, right, bottom = (round(x) for x in detection.box)
    if detection.mask is not None:
        image = np.where(detection.mask[:, :, None], image, np.uint8(_GREY))
    height, width = image.shape[:2]
    left, top = min(max(left, 0), width - 1), min(max(top, 0), height - 1)
    return image[top : max(bottom, top + 1), left : max(right, left + 1)]
