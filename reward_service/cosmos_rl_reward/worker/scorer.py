"""A reward replica: loads one reward and scores what the host sends. Run by path, by the reward's own interpreter.

Needs Python >= 3.10 and numpy there; nothing of the service has to be installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def bootstrap() -> None:
    """Make ``cosmos_rl_reward`` importable from the folder this file lies in, and nothing else of that environment."""
    package = Path(__file__).resolve().parent.parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != package / "worker"]
    spec = importlib.util.spec_from_file_location(
        "cosmos_rl_reward", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{package} is not the package")
    module = importlib.util.module_from_spec(spec)
    sys.modules["cosmos_rl_reward"] = module
    spec.loader.exec_module(module)


def die_with_parent(parent: int) -> None:
    """Be killed when the host exits (Linux), also when it exited before this call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


class Scorer:
    """One handler and the calls to it."""

    def __init__(self, start: dict[str, Any]) -> None:
        from cosmos_rl_reward.worker.find_handler import find_handler

        self.name: str = start["name"]
        self.fetched: dict[str, Any] = {}
        kind = find_handler(self.name, start["reward_class"], start["function"])
        self.torch: Any = None
        if kind.array_type == "torch":
            self.torch = _import_torch(self.name)
        device = start["kwargs"]["device"]
        if device == "auto":
            device = "cpu"
            if self.torch is not None and self.torch.cuda.is_available():
                device = "cuda"
        self.handler = kind(**{**start["kwargs"], "device": device})
        if start["op"] == "fetch":
            fetched, wanted = self.handler.fetch(start["offline"]), self.handler.NEEDS_LATENT_DECODER
            self.fetched = {"fetched": fetched, "needs_latent_decoder": wanted}
            return
        self._video_frames: int = start.get("video_frames", 0)
        self._takes_frames = "video" not in self.handler.media_types
        if self._video_frames and not self._takes_frames:
            raise _not_ready(f"reward_args.video_frames: {self.name} scores videos itself; leave it out")
        self.handler.set_up()
        self.warning = self.handler.warning
        if start["self_test"]:
            self.warning = _join(self.warning, self._self_test())
        self.provenance = _to_json_types(self.handler.provenance())

    def describe(self) -> dict[str, Any]:
        """What the front has to know of this reward."""
        return {
            "media_types": ["image", "video"] if self._takes_frames else list(self.handler.media_types),
            "mergeable": self.handler.mergeable,
            "max_batch": self.handler.max_batch,
            "required_metadata": list(self.handler.required_metadata),
            "score_keys": list(self.handler.score_keys),
            "needs_latent_decoder": self.handler.NEEDS_LATENT_DECODER,
            "provenance": self.provenance,
            "warning": self.warning,
            "python": sys.executable,
            "versions": _versions(),
        }

    def _call(self, images: Any, metadata: dict[str, Any]) -> Any:
        if self.torch is not None:
            images = self.torch.from_numpy(images).to(self.handler.device)
        with _catch_exit():
            return self.handler.calculate_reward(images, metadata)

    def _call_by_media(self, images: Any, metadata: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What the reward returned, by frames where it scores images and these are videos; and the provenance."""
        if images.ndim == 4 or not self._takes_frames:
            return self._call(images, metadata), self.provenance
        from cosmos_rl_reward.worker.frames import choose_frames, score_frames

        indices = choose_frames(images.shape[2], self._video_frames)
        returned = score_frames(images, metadata, indices, self.handler.max_batch, self._call)
        rule = {"score": "mean over frames", "scored": len(indices), "of": images.shape[2]}
        return returned, {**self.provenance, "frames": rule}

    def _self_test(self) -> str:
        from cosmos_rl_reward.worker.inputs import KINDS, describe
        from cosmos_rl_reward.worker.outcome import self_test

        def score(images: Any, metadata: dict[str, Any]) -> Any:
            info = {"uuid": "self-test", "media_type": KINDS[images.ndim], "input_info": describe(images)}
            return self._call(images, {"decode_duration": "0.00", "decoded_info": {}, **metadata, **info})

        return self_test(self.handler, score)

    def score(self, requests: list[dict[str, str]]) -> list[dict[str, Any]]:
        """Score jobs given as ``{"id", "path", "decoded"}``; one reply each, in the same order."""
        from cosmos_rl_reward.worker.inputs import Input, group_inputs, read_input

        replies: dict[str, dict[str, Any]] = {}
        inputs: list[Input] = []
        for request in requests:
            try:
                inputs.append(read_input(**request))
            except Exception as error:
                replies[request["id"]] = _describe_failure(request["id"], error)
        for batch in group_inputs(inputs, self.handler.required_metadata):
            replies.update({answer["id"]: answer for answer in self._try(batch)})
        return [replies[request["id"]] for request in requests]

    def _try(self, batch: list[Any]) -> list[dict[str, Any]]:
        """Replies for one call; if it fails, each job is scored alone, to find out which one is the cause."""
        try:
            return self._score_batch(batch)
        except Exception as error:
            if len(batch) == 1:
                return [_describe_failure(batch[0].id, error)]
        return [answer for one in batch for answer in self._try([one])]

    def _score_batch(self, batch: list[Any]) -> list[dict[str, Any]]:
        from cosmos_rl_reward.results import SUCCEEDED, encode
        from cosmos_rl_reward.worker.inputs import merge, merge_bad_samples
        from cosmos_rl_reward.worker.outcome import check, mask_scores, mean_scores, slice_scores

        images, metadata = merge(batch, self.handler.required_metadata)
        began = time.perf_counter()
        returned, provenance = self._call_by_media(images, metadata)
        duration = time.perf_counter() - began
        scores, errors = check(returned, len(images))
        bad = merge_bad_samples(batch)
        scores, errors = mask_scores(scores, bad), {**errors, **bad}
        warning = _join(self.handler.warning, str(returned.get("warning") or ""))
        answers, at = [], 0
        for one in batch:
            end = at + len(one.images)
            mine = {str(i - at): e for i, e in sorted(errors.items()) if at <= i < end}
            own = slice_scores(scores, at, end)
            result = {
                "scores": own,
                "input_info": one.info,
                "duration": f"{duration:.2f}",
                "decoded_duration": one.metadata["decode_duration"],
                "type": self.name,
                "state": SUCCEEDED,
                "item_errors": mine,
                "warning": warning,
                "provenance": provenance,
            }
            if len(batch) == 1:
                result.update(_to_json_types({k: returned[k] for k in ("duration", "input_info") if k in returned}))
            for optional in ("item_errors", "warning"):
                if not result[optional]:
                    del result[optional]
            body = encode(result).decode()
            answer = {"id": one.id, "body": body, "failed": len(mine), "batch": len(images), "s": duration}
            answers.append({**answer, "means": mean_scores(own)})
            at = end
        return answers


class DecoderWorker:
    """The VAE instead of a reward: writes a decoded video for each job."""

    def __init__(self, start: dict[str, Any]) -> None:
        from cosmos_rl_reward.decode import LatentDecoder

        self.fetched: dict[str, Any] = {}
        self.decoder = LatentDecoder(**start["kwargs"])
        if start["op"] == "fetch decoder":
            self.fetched = {"fetched": self.decoder.fetch(start["offline"])}
        else:
            self.decoder.set_up()

    def describe(self) -> dict[str, Any]:
        """What the host has to know."""
        about = {"mergeable": False, "max_batch": 1, "warning": "", "python": sys.executable}
        return {**about, "versions": _versions()}

    def score(self, requests: list[dict[str, str]]) -> list[dict[str, Any]]:
        """Decode jobs; one reply each."""
        replies = []
        for request in requests:
            try:
                began = time.perf_counter()
                with _catch_exit():
                    self.decoder.decode(Path(request["path"]), Path(request["decoded"]))
                seconds = time.perf_counter() - began
                replies.append({"id": request["id"], "body": "", "failed": 0, "batch": 1, "s": seconds})
            except Exception as error:
                replies.append(_describe_failure(request["id"], error))
        return replies


@contextlib.contextmanager
def _catch_exit() -> Iterator[None]:
    """``sys.exit`` and the like fail this try; they do not end the process with its loaded model."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"the reward raised {type(error).__name__}: {error}") from error


def _not_ready(reason: str) -> Exception:
    from cosmos_rl_reward.handler import NotReady

    return NotReady(reason)


def _import_torch(name: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise _not_ready(
            f"{name} needs torch, which {sys.executable} does not have: {error}; run cosmos-rl-reward-prepare"
        ) from error
    return torch


def _versions() -> dict[str, str]:
    """Of Python and of the libraries that numbers depend on most, those that are installed here."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("torch", "transformers", "diffusers", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _join(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


def _to_json_types(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _describe_failure(job_id: str, error: Exception) -> dict[str, Any]:
    """A reply for a job that has no result; ``again`` says whether another try could help."""
    from cosmos_rl_reward.handler import BadInput
    from cosmos_rl_reward.payload.errors import Refused
    from cosmos_rl_reward.results import printable
    from cosmos_rl_reward.worker.outcome import BadOutput

    final = isinstance(error, (BadInput, BadOutput, Refused))
    text = str(error)
    if not final:
        traceback.print_exception(error)
        text = f"{type(error).__name__}: {error}"
    return {"id": job_id, "error": printable(text) or type(error).__name__, "again": not final}


def serve(channel: socket.socket, log: Any) -> None:
    """Start the reward, then answer the host until it disconnects."""
    from cosmos_rl_reward.worker.wire import pack, receive

    start = receive(channel)
    if start is None:
        return
    try:
        from cosmos_rl_reward.handler import NotReady
    except ImportError as error:
        reason = f"every reward's environment needs numpy (Python >= 3.10): {error}; run cosmos-rl-reward-prepare"
        channel.sendall(pack({"ready": False, "reason": reason}))
        return
    try:
        kind: Any = {"decode": DecoderWorker, "fetch decoder": DecoderWorker}.get(start["op"], Scorer)
        worker = kind(start)
    except BaseException as error:
        reason = str(error)
        if not isinstance(error, NotReady):
            traceback.print_exception(error)
            reason = f"{type(error).__name__}: {error}"
        channel.sendall(pack({"ready": False, "reason": reason}))
        return
    about = worker.fetched or worker.describe()
    channel.sendall(pack({"ready": True, "about": about}))
    while (message := receive(channel)) is not None:
        replies = worker.score(message["jobs"])
        log.flush()
        channel.sendall(pack({"replies": replies}))


def main() -> None:
    """Entry point: ``scorer.py <socket fd> <parent pid>``."""
    die_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the supervisor, which drains
    bootstrap()
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        serve(channel, sys.stdout)


if __name__ == "__main__":
    main()
