"""Latents to videos with the Wan VAE of diffusers. Imported only by the decoder's worker."""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_rl_reward.handler import BadInput, NotReady
from cosmos_rl_reward.payload.arrays import BFLOAT16, ArrayRef, load, row_major
from cosmos_rl_reward.rewards.samples import round_pixels
from cosmos_rl_reward.rewards.weights import find_folder, require_packages
from cosmos_rl_reward.spool import HEADER_BYTES, Job, Spool, pack_header
from cosmos_rl_reward.worker.inputs import describe, read_header

_FILES = ("vae/*.json", "vae/*.safetensors")
_NOTE_BYTES = 1024
_REASON_BYTES = 96  # of the note, for the reason of one sample that could not be decoded


class NotFinite(ValueError):
    """Latents, or the video they decode to, hold NaN or infinity."""


class LatentDecoder:
    """Holds the VAE for 16 channels (Wan 2.1) and, when it is configured, the one for 48 (Wan 2.2)."""

    def __init__(
        self, model_path: str, wan2pt2_model_path: str, dtype: str, device: str, max_decoded_bytes: int
    ) -> None:
        self.paths = {16: model_path, 48: wan2pt2_model_path}
        self.max_bytes = max_decoded_bytes
        self.dtype_name, self.device = dtype, device
        self.models: dict[int, Any] = {}

    def fetch(self, offline: bool) -> str | None:
        """Download the VAEs that are named by the hub; returns a line for the report.

        Raises:
            NotReady: they are neither here nor available from the hub.
        """
        require_packages("torch", "diffusers")
        names = [path for path in self.paths.values() if path]
        for name in names:
            if not Path(name).expanduser().exists():
                find_folder(name, _FILES, offline=offline)
            elif Path(name).is_file() and not offline:  # its configuration comes from the hub
                self._load(name, False)
        if not names:
            return None
        return f"latent decoder: {', '.join(names)}"

    def set_up(self) -> None:
        """Load the VAEs; nothing is downloaded.

        Raises:
            NotReady: torch, diffusers or the weights are missing.
        """
        self.fetch(offline=True)
        import torch

        self.torch = torch
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, self.dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise NotReady(f"decode_args.dtype = {self.dtype_name!r} is not a torch type")
        for channels, path in self.paths.items():
            if path:
                model = self._load(path, True, torch_dtype=dtype)
                if model.config.z_dim != channels:
                    raise NotReady(f"decode_args: the VAE {path!r} has {model.config.z_dim} channels, not {channels}")
                self.models[channels] = model.to(self.device).eval()

    def _load(self, path: str, offline: bool, **how: Any) -> Any:
        from diffusers import AutoencoderKLWan

        try:
            if Path(path).is_file():
                return AutoencoderKLWan.from_single_file(path, local_files_only=offline, **how)
            if (Path(path) / "vae").is_dir() or not Path(path).exists():
                how["subfolder"] = "vae"
            return AutoencoderKLWan.from_pretrained(path, local_files_only=offline, **how)
        except (OSError, ValueError) as error:
            raise NotReady(
                f"decode_args: the VAE {path!r} cannot be loaded: {str(error)[:300]}; run cosmos-rl-reward-prepare"
            ) from error

    def pixels(self, latents: Any) -> np.ndarray:
        """Decode one sample ``[C, T, h, w]`` to uint8 ``[3, frames, H, W]``.

        The wire's latents are normalised: (posterior mean - ``latents_mean``) / ``latents_std`` of the VAE.

        Raises:
            NotFinite: NaN or infinity would become black pixels, which score like a real video.
        """
        torch, model = self.torch, self.models[latents.shape[0]]
        mean, std = (
            torch.tensor(getattr(model.config, name), dtype=torch.float32).view(1, -1, 1, 1, 1)
            for name in ("latents_mean", "latents_std")
        )
        z = latents[None].float() * std + mean
        if not bool(z.isfinite().all()):
            raise NotFinite("latents: values must be finite")
        with torch.inference_mode():
            video = model.decode(z.to(self.device, model.dtype)).sample[0].float()
        if not bool(video.isfinite().all()):
            raise NotFinite("latents: they decode to a video that is not finite")
        levels = ((video.clamp(-1, 1) + 1) / 2 * 255).cpu().numpy()
        return round_pixels(levels, 0.0, 255.0)

    def decode(self, path: Path, target: Path) -> None:
        """Decode the job at ``path`` sample by sample into ``target``, which appears when it is whole.

        A sample that cannot be decoded is black there, and the note of the file has the reason.

        Raises:
            BadInput: no sample can be decoded, or the whole job takes more than ``max_decoded_bytes``.
        """
        job, _ = read_header(path)
        latents = self._latents(load(str(path), job.array), job.array.dtype)
        if latents.shape[1] not in self.models:
            raise NotReady(f"there is no VAE for {latents.shape[1]} channels")
        aside = Spool(target.parents[2]).incoming / uuid.uuid4().hex
        try:
            self._write(aside, job, latents)
            os.replace(aside, target)
        finally:
            aside.unlink(missing_ok=True)

    def _write(self, path: Path, job: Job, latents: Any) -> None:
        """The file of a job's decoded latents: header, note, videos."""
        began, count = time.perf_counter(), len(latents)
        begin = HEADER_BYTES + _NOTE_BYTES + _REASON_BYTES * count
        shape: tuple[int, ...] = ()
        bad: dict[int, str] = {}
        with open(path, "wb") as file:
            for k, sample in enumerate(latents):
                try:
                    video = self.pixels(sample)
                except NotFinite as error:  # its place stays empty, which is black
                    bad[k] = str(error)
                    continue
                shape = (count, *video.shape)
                if video.nbytes * count > self.max_bytes:
                    raise BadInput(
                        f"latents: the job decodes to {video.nbytes * count} bytes; at most {self.max_bytes}"
                        " (max_decoded_bytes)"
                    )
                file.seek(begin + k * video.nbytes)
                file.write(video.tobytes())
            if not shape:
                raise BadInput(f"no sample can be decoded; the first: {bad[0]}")
            array = ArrayRef("|u1", shape, row_major(shape), begin)
            file.truncate(begin + array.size)
            note = {
                "input_info": {**describe(latents.float().numpy()), "dtype": "torch.bfloat16"},
                "decode_duration": f"{time.perf_counter() - began:.2f}",
                "decoded_info": {"shape": list(shape), "dtype": "torch.uint8", "vae": self.paths[latents.shape[1]]},
                "bad": bad,
            }
            header = replace(job, media="video", array=array, line_end=begin - 1, size=begin + array.size)
            file.seek(0)
            file.write(pack_header(header))
            file.write(json.dumps(note).encode().ljust(begin - HEADER_BYTES - 1) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _latents(self, array: np.ndarray, dtype: str) -> Any:
        """As bfloat16, whatever the wire had."""
        torch = self.torch
        if dtype == BFLOAT16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array).to(torch.bfloat16)
