"""Your own small classifier as a reward: the probability it gives to the class that was asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from cosmos_rl_reward.handler import BaseRewardHandler, NotReady, RewardRegistry
from cosmos_rl_reward.handler.base import digest
from cosmos_rl_reward.rewards.samples import SampleError, as_images, get_per_sample, score_samples


def softmax(logits: np.ndarray) -> np.ndarray:
    """Along the last axis."""
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def dense_layers(arrays: dict[str, np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """A network of dense layers with ReLU between them: ``W0 [in, out], b0 [out], W1, b1, ...`` -> logits.

    Raises:
        NotReady: arrays are missing or do not fit together.
    """
    depth = len(arrays) // 2
    names = [f"{kind}{layer}" for layer in range(depth) for kind in "Wb"]
    if not depth or set(names) != set(arrays):
        raise NotReady(f"classifier weights: arrays {sorted(arrays)}; expected W0, b0, W1, b1, ...")
    layers = [(arrays[f"W{i}"], arrays[f"b{i}"]) for i in range(depth)]
    for index, (weight, bias) in enumerate(layers):
        inputs = layers[index - 1][0].shape[-1] if index else weight.shape[0]
        if weight.ndim != 2 or bias.shape != weight.shape[1:] or weight.shape[0] != inputs:
            raise NotReady(f"classifier weights: W{index} {weight.shape} and b{index} {bias.shape} do not fit")

    def forward(x: np.ndarray) -> np.ndarray:
        for weight, bias in layers[:-1]:
            x = np.maximum(x @ weight + bias, 0)
        return x @ layers[-1][0] + layers[-1][1]

    return forward


def label_in_prompt(prompt: str, labels: list[str]) -> int | None:
    """Index of the label the prompt names as a whole word (the longest one wins); None without any."""
    found = [
        (len(label), -index)
        for index, label in enumerate(labels)
        if re.search(rf"(?<!\w){re.escape(label)}(?!\w)", prompt, re.IGNORECASE)
    ]
    return -max(found)[1] if found else None


@RewardRegistry.register()
class ClassifierReward(BaseRewardHandler):
    """Softmax probability of the wanted class, in [0, 1].

    ``model_path`` is an ONNX file (input ``[N, C, H, W]``, ``[N, H, W, C]`` or ``[N, D]``, output logits ``[N, K]``),
    or an ``.npz`` of dense layers (see ``dense_layers``; input ``[N, D]``). The wanted class is ``metadata.labels`` (an
    index or a name for each sample; null: none), else the label that the prompt names.

    Options:
        labels: names of the K classes, in order.
        size: [height, width] of the classifier's input; needed where the model does not fix it.
        channels: 1 (brightness) or 3; 0 = what the model's input says (flattened input: 1).
        mean, std: pixels are ``(value / 255 - mean) / std``; a number, or one for each channel.
    """

    reward_name = "classifier"
    array_type = "numpy"
    media_types = ("image",)
    score_keys = ("classifier", "classifier_correct", "classifier_label")
    OPTIONS: ClassVar[dict[str, Any]] = {"labels": [], "size": [], "channels": 0, "mean": 0.0, "std": 1.0}

    def set_up(self) -> None:
        """Load the file and settle the input's layout."""
        path = Path(self.model_path)
        if not path.is_file() or path.suffix not in (".onnx", ".npz"):
            raise NotReady(f"reward_args.model_path: {self.model_path!r} is not an .onnx or .npz file")
        self._labels = [str(label) for label in self.options["labels"]]
        shape = self._load_onnx(path) if path.suffix == ".onnx" else self._load_npz(path)
        self._layout(shape)
        self.model_digest = digest([path])

    def _load_npz(self, path: Path) -> list[Any]:
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name].astype(np.float32) for name in file.files}
        except (ValueError, OSError) as error:
            raise NotReady(f"reward_args.model_path: numpy cannot read {path}: {error}") from error
        self._logits = dense_layers(arrays)
        return [None, arrays["W0"].shape[0]]

    def _load_onnx(self, path: Path) -> list[Any]:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # small model, many images at once
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has a dozen exception types without a common base
            raise NotReady(f"reward_args.model_path: onnxruntime cannot load {path}: {error}") from error
        given = session.get_inputs()[0]
        self._logits = lambda x: np.asarray(session.run(None, {given.name: x})[0])
        return list(given.shape)

    def _layout(self, shape: list[Any]) -> None:
        """Input ``[N, ...]`` of the model (unknown sizes are names or None) -> height, width, channels, axis order."""
        sizes = [n if isinstance(n, int) and n > 0 else None for n in shape]
        wanted = self.options["size"] or [None, None]
        channels = int(self.options["channels"])
        if len(sizes) == 4:
            self._order = "NHWC" if sizes[3] in (1, 3) and sizes[1] not in (1, 3) else "NCHW"
            at = sizes[1:] if self._order == "NCHW" else [sizes[3], *sizes[1:3]]
            self._channels, height, width = channels or at[0] or 3, at[1] or wanted[0], at[2] or wanted[1]
        elif len(sizes) == 2:
            self._order, self._channels, (height, width) = "ND", channels or 1, wanted
            if height is None and sizes[1] is not None:
                height = width = round((sizes[1] / self._channels) ** 0.5)
        else:
            raise NotReady(f"classifier input {shape}: expected [N, C, H, W], [N, H, W, C] or [N, D]")
        if not height or not width:
            raise NotReady("reward_args.options.size: the model does not fix its input size; give [height, width]")
        if len(sizes) == 2 and sizes[1] not in (None, height * width * self._channels):
            raise NotReady(
                f"classifier input of {sizes[1]} values is not {height} x {width} x {self._channels};"
                " set reward_args.options.size and channels"
            )
        self._size = (int(height), int(width))

    def _inputs(self, images: np.ndarray) -> np.ndarray:
        """uint8 ``[B, H, W, 3]`` -> float32 in the model's layout."""
        height, width = self._size
        mode = "L" if self._channels == 1 else "RGB"
        resized = [
            np.asarray(Image.fromarray(p).convert(mode).resize((width, height), Image.Resampling.BILINEAR))
            for p in images
        ]
        x = np.stack(resized).reshape(len(images), height, width, self._channels) / 255.0
        x = (x - np.asarray(self.options["mean"])) / np.asarray(self.options["std"])
        if self._order == "NCHW":
            x = x.transpose(0, 3, 1, 2)
        return np.ascontiguousarray(x.reshape(len(x), -1) if self._order == "ND" else x, dtype=np.float32)

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        images = as_images(images)
        count = len(images)
        prompts = get_per_sample(metadata, "prompts", count)
        asked = get_per_sample(metadata, "labels", count) if "labels" in metadata else [None] * count
        probabilities = softmax(self._logits(self._inputs(images)).astype(np.float64))

        def score(index: int) -> dict[str, Any]:
            row = probabilities[index]
            wanted, top = self._wanted(asked[index], prompts[index], len(row)), int(row.argmax())
            named = self._labels[top] if top < len(self._labels) else str(top)
            return {
                "classifier": float(row[wanted]),
                "classifier_correct": float(wanted == top),
                "classifier_label": named,
            }

        return score_samples(self.score_keys, count, score)

    def _wanted(self, label: Any, prompt: str, classes: int) -> int:
        """Index of the class that a sample should show."""
        if label is None:
            found = label_in_prompt(prompt, self._labels)
            if found is None:
                raise SampleError(f"the prompt {prompt[:80]!r} names none of the labels {self._labels[:20]}")
            return found
        if isinstance(label, str) and label in self._labels:
            return self._labels.index(label)
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < classes:
            return label
        raise SampleError(f"metadata.labels: {label!r} is neither an index below {classes} nor one of the labels")

    def probes(self) -> list[tuple[np.ndarray, dict[str, Any]]]:
        """The default images, asked for class 0."""
        return [(image, {**metadata, "labels": [0]}) for image, metadata in super().probes()]
