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

from cosmos_rl_reward.handler import NotReady
from cosmos_rl_reward.payload.arrays import BFLOAT16, ArrayRef, load, row_major
from cosmos_rl_reward.spool import HEADER_BYTES, Spool, pack_header
from cosmos_rl_reward.worker.inputs import describe, read_header

_NOTE_BYTES = 1024


class LatentDecoder:
    """Holds the VAE for 16 channels (Wan 2.1) and, when it is configured, the one for 48 (Wan 2.2)."""

    def __init__(self, model_path: str, wan2pt2_model_path: str, dtype: str, device: str) -> None:
        self.paths = {16: model_path, 48: wan2pt2_model_path}
        self.dtype_name, self.device = dtype, device
        self.models: dict[int, Any] = {}

    def set_up(self) -> None:
        """Load the VAEs.

        Raises:
            NotReady: torch, diffusers or the weights are missing.
        """
        try:
            import torch
            from diffusers import AutoencoderKLWan
        except ImportError as error:
            raise NotReady(f"decoding latents needs torch and diffusers: {error}") from error
        self.torch = torch
        if self.device == "auto":
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, self.dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise NotReady(f"decode_args.dtype = {self.dtype_name!r} is not a torch type")
        for channels, path in self.paths.items():
            if not path:
                continue
            try:
                if Path(path).is_file():
                    model = AutoencoderKLWan.from_single_file(path, torch_dtype=dtype)
                else:
                    inside = (Path(path) / "vae").is_dir() or not Path(path).exists()
                    model = AutoencoderKLWan.from_pretrained(
                        path, subfolder="vae" if inside else None, torch_dtype=dtype
                    )
            except (OSError, ValueError) as error:
                raise NotReady(f"decode_args: the VAE {path!r} cannot be loaded: {str(error)[:300]}") from error
            if model.config.z_dim != channels:
                raise NotReady(f"decode_args: the VAE {path!r} has {model.config.z_dim} channels, not {channels}")
            self.models[channels] = model.to(self.device).eval()

    def pixels(self, latents: Any) -> np.ndarray:
        """Decode one sample ``[C, T, h, w]`` to uint8 ``[3, frames, H, W]``.

        The wire's latents are normalised: (posterior mean - ``latents_mean``) / ``latents_std`` of the VAE.
        """
        torch, model = self.torch, self.models[latents.shape[0]]
        mean, std = (
            torch.tensor(getattr(model.config, name), dtype=torch.float32).view(1, -1, 1, 1, 1)
            for name in ("latents_mean", "latents_std")
        )
        z = latents[None].float() * std + mean
        with torch.inference_mode():
            video = model.decode(z.to(self.device, model.dtype)).sample[0].float()
        return ((video.clamp(-1, 1) + 1) / 2 * 255).to(torch.uint8).cpu().numpy()

    def decode(self, path: Path, target: Path) -> None:
        """Decode the job at ``path`` sample by sample into ``target``, which appears when it is whole."""
        job, _ = read_header(path)
        latents = self._latents(load(str(path), job.array), job.array.dtype)
        if latents.shape[1] not in self.models:
            raise NotReady(f"there is no VAE for {latents.shape[1]} channels")
        began = time.perf_counter()
        aside = Spool(target.parents[2]).incoming / uuid.uuid4().hex
        begin = HEADER_BYTES + _NOTE_BYTES
        shape: tuple[int, ...] = ()
        with open(aside, "wb") as file:
            file.seek(begin)
            for sample in latents:
                video = self.pixels(sample)
                shape = (len(latents), *video.shape)
                file.write(video.tobytes())
            numbers = latents.float().numpy()
            note = {
                "input_info": {**describe(numbers), "dtype": "torch.bfloat16"},
                "decode_duration": f"{time.perf_counter() - began:.2f}",
                "decoded_info": {"shape": list(shape), "dtype": "torch.uint8", "vae": self.paths[latents.shape[1]]},
            }
            array = ArrayRef("|u1", shape, row_major(shape), begin)
            header = replace(job, media="video", array=array, line_end=begin - 1, size=file.tell())
            file.seek(0)
            file.write(pack_header(header))
            file.write(json.dumps(note).encode().ljust(_NOTE_BYTES - 1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)

    def _latents(self, array: np.ndarray, dtype: str) -> Any:
        """As bfloat16, whatever the wire had."""
        torch = self.torch
        if dtype == BFLOAT16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array).to(torch.bfloat16)
