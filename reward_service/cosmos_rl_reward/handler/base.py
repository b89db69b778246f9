"""The contract between the service and a reward.

A reward is a class like this, in any module of the reward's own environment::

    @RewardRegistry.register()
    class Sharpness(BaseRewardHandler):
        reward_name = "sharpness"
        array_type = "numpy"
        media_types = ("image",)

        def set_up(self):
            self.model = load(self.model_path)       # raise NotReady("...") when something is missing

        def calculate_reward(self, images, metadata):
            values = [self.model(image) for image in images]
            return {"scores": {"sharpness": values}}

The worker runs ``set_up`` once, scores the two ``probes`` as a self-test, then calls ``calculate_reward`` for one job
after the other from one thread. It checks the results (length B, numbers finite), so a handler never has to invent
a number.
"""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

_SMALL = 1 << 30  # bytes; larger weight files are sampled, not read whole


class NotReady(Exception):
    """The reward cannot start: weights, a library, an endpoint or a device is missing. Raise it from ``set_up``.

    The message is shown to clients and operators as it is: say what is missing, where it was looked for, what to do.
    The service shows the reward as failed, refuses its jobs with that reason, and tries again later.
    """


class BadInput(Exception):
    """This job can never be scored: a field of the metadata is missing or wrong. Raise it from ``calculate_reward``.

    The job fails at once with the message, without another try.
    """


class BaseRewardHandler:
    """Base class of all rewards.

    Class attributes:
        reward_name: key in ``reward_fn`` of a request and in the configuration.
        NEEDS_LATENT_DECODER: latent jobs are expected: start the VAE worker with the service, not at the first job.
        array_type: ``"torch"`` (default): ``images`` is a ``torch.uint8`` tensor on ``device``. ``"numpy"``: a
            ``numpy.uint8`` array, and torch is never imported; choose it for rewards without a network, so that they
            run in environments without torch and start quickly. A handler that keeps ``"torch"`` in an environment
            without torch does not start, with that reason.
        media_types: subset of ``("image", "video")`` it can score. A reward of videos alone gets no images: such
            requests are rejected on arrival. One of images alone gets the frames of videos as images, and the mean of
            their scores is the video's. Latents arrive decoded, so they count as video.
        mergeable: jobs of several requests may be scored in one call when their images have the same shape. False
            (default) means each call is exactly one request; needed when samples of a request are compared.
        max_batch: most samples in one merged call; ``max_batch`` of the configuration overrides it.
        required_metadata: metadata keys without which a request is rejected on arrival. Those that are lists of length
            B are joined when jobs are merged, like ``prompts`` and what the request names under ``per_item``.
        score_keys: names in ``scores``, for the list of rewards that clients can ask for. ``set_up`` may narrow them
            where the configuration leaves some without a value.
        reward_version: changes whenever the same image may get another number.
        preprocessing: a name for how images are prepared for the model; shown in the provenance.
        OPTIONS: names and defaults of the reward's own options, ``[reward_args.options]`` in the configuration.

    Attributes:
        model_path, device, dtype, download_path, endpoint_url, endpoint_api_key: as configured (strings).
        options: ``OPTIONS`` with the configured values in place.
        model_digest: set by ``set_up`` where there are weights (see ``digest``); shown in the provenance.
        warning: what a reader of every score has to know; ``set_up`` may set it. It is shown with the reward and put
            into each result.
    """

    reward_name: ClassVar[str] = ""
    NEEDS_LATENT_DECODER: ClassVar[bool] = False
    array_type: ClassVar[str] = "torch"
    media_types: ClassVar[tuple[str, ...]] = ("image", "video")
    mergeable: ClassVar[bool] = False
    max_batch: ClassVar[int] = 16
    required_metadata: ClassVar[tuple[str, ...]] = ()
    score_keys: tuple[str, ...] = ()
    reward_version: ClassVar[str] = "1"
    preprocessing: ClassVar[str] = ""
    OPTIONS: ClassVar[dict[str, Any]] = {}

    def __init__(self, **kwargs: Any) -> None:
        self.model_path: str = kwargs.get("model_path", "")
        self.device: str = kwargs.get("device", "cpu")
        self.dtype: str = kwargs.get("dtype", "float16")
        self.download_path: str = kwargs.get("download_path", "")
        self.endpoint_url: str = kwargs.get("endpoint_url", "")
        self.endpoint_api_key: str = kwargs.get("endpoint_api_key", "")
        self.warning = self.model_digest = ""
        self.options: dict[str, Any] = {**self.OPTIONS, **self._check_options(kwargs.get("options") or {})}

    def _check_options(self, options: dict[str, Any]) -> dict[str, Any]:
        for name in options:
            if name not in self.OPTIONS:
                hint = f"known are: {', '.join(self.OPTIONS) or 'none'}"
                if close := difflib.get_close_matches(name, self.OPTIONS, 1):
                    hint = f"did you mean {close[0]!r}?"
                raise NotReady(f"reward_args.options.{name}: no such option of {self.reward_name}; {hint}")
        return options

    def set_up(self) -> None:
        """Load models. Runs once in the worker, before any job. Nothing is downloaded here: ``fetch`` does that.

        Raises:
            NotReady: something is missing; the message says what and what to do.
        """

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        """Score one job (or a merged batch, see ``mergeable``).

        Args:
            images: uint8, ``[B, H, W, 3]`` for images and ``[B, 3, T, H, W]`` for videos and decoded latents, 0..255;
                a torch tensor on ``self.device``, or a numpy array (see ``array_type``). Read only. An invalid sample
                (NaN, out of range) is passed as black, and its score is dropped.
            metadata: the request's metadata (``prompts`` is always a list of length B) plus ``uuid``, ``media_type``
                (``image`` or ``video``), ``input_info``,
                ``decode_duration`` and ``decoded_info``.

        Returns:
            ``{"scores": {key: list of length B}}``. An entry is a number, a string, or ``None`` for a sample that could
            not be scored; then ``"item_errors": {index: message}`` says why. Other keys of the result object
            (``input_info``, ``duration``, ``decoded_duration``, ``type``) are filled in when they are not given, and
            ``warning`` is a text for the reader of this result.
            The documented envelope ``{"scores": None, "error": message}`` fails the whole job.

        Raises:
            BadInput: the metadata can never be scored. Any other exception is retried, then the job fails with it.
        """
        raise NotImplementedError

    def probes(self) -> list[tuple[np.ndarray, dict[str, Any]]]:
        """Two one-sample jobs whose scores must be finite and should differ, for the self-test at start.

        Images are numpy uint8 in the layout of ``calculate_reward``. The default is a flat grey image and a colour
        gradient with the same prompt; override it where these two would rightly score the same (text, objects).
        """
        ramp = np.linspace(0, 255, 64, dtype=np.uint8)
        channels = np.broadcast_arrays(ramp[:, None], ramp[None, :], ramp[::-1, None])
        gradient = np.stack(channels, -1)[None]  # [1, 64, 64, 3]
        media = [np.full_like(gradient, 127), gradient]
        metadata: dict[str, Any] = {"prompts": ["a photo of a cat"]}
        if "image" not in self.media_types:
            moving = [np.stack([np.roll(p[0], 4 * t, 1) for t in range(8)]) for p in media]  # [T, H, W, 3]
            media = [np.ascontiguousarray(m.transpose(3, 0, 1, 2)[None]) for m in moving]
            metadata["video_infos"] = [{"video_fps": 8.0}]
        return [(sample, dict(metadata)) for sample in media]

    def provenance(self) -> dict[str, Any]:
        """What a number depends on; stored with each result so that two runs can be compared."""
        about = {"reward_version": self.reward_version, "device": self.device, **self.options}
        if self.array_type == "torch":
            about["dtype"] = self.dtype
        for name in ("model_digest", "preprocessing"):
            if value := getattr(self, name):
                about[name] = value
        return about

    def fetch(self, offline: bool) -> str | None:
        """Download the weights ``set_up`` needs; called by ``cosmos-rl-reward-prepare`` in the reward's environment.

        Args:
            offline: nothing may be downloaded; only say what is missing.

        Returns:
            A line for the report, or None when the reward has nothing to download.

        Raises:
            NotReady: the weights are not there and could not be fetched.
        """
        return None


def digest(paths: Iterable[str | os.PathLike[str]]) -> str:
    """SHA-256 over names, sizes and contents of weight files (folders: their files, sorted).

    Files over 1 GiB are sampled (first, middle and last MiB), and the digest says so by its prefix.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            files += sorted(p for p in path.rglob("*") if p.is_file())
        else:
            files.append(path)
    total, kind = hashlib.sha256(), "sha256"
    for path in files:
        size = path.stat().st_size
        total.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as file:
            if size > _SMALL:
                kind = "sampled-sha256"
                for offset in (0, size // 2, size - (1 << 20)):
                    file.seek(offset)
                    total.update(file.read(1 << 20))
            else:
                while chunk := file.read(1 << 20):
                    total.update(chunk)
    return f"{kind}:{total.hexdigest()}"
