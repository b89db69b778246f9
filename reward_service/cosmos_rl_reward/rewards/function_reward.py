"""A plain Python function as a reward."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from cosmos_rl_reward.handler import BaseRewardHandler, NotReady, RewardRegistry
from cosmos_rl_reward.handler.base import digest
from cosmos_rl_reward.rewards.pictures import as_images, as_videos, prompts_of, score_samples, to_numpy


@RewardRegistry.register()
class FunctionReward(BaseRewardHandler):
    """Calls ``function(to_be_evaluated, reference=None, **kw) -> float | None`` for each sample.

    ``to_be_evaluated`` is uint8 ``[H, W, 3]`` for an image and ``[T, H, W, 3]`` for a video; ``reference`` the sample's
    entry of ``metadata.references``; keywords are ``prompt``, ``metadata`` (the request's metadata, lists of length B
    cut down to this sample's entry) and ``fps`` (of a video, when it was sent). A function that takes fewer keywords
    gets fewer. None means that the sample has no score.

    Options:
        function: ``package.module:name`` or ``path/to/file.py:name``.
    """

    reward_name = "function"
    array_type = "numpy"
    score_keys = ("function",)
    OPTIONS: ClassVar[dict[str, Any]] = {"function": ""}
    wrapped: ClassVar[Callable[..., Any] | None] = None

    def set_up(self) -> None:
        """Import the function."""
        self._function = type(self).wrapped or load_function(str(self.options["function"]))
        parameters = inspect.signature(self._function).parameters.values()
        self._takes = (
            None if any(p.kind is p.VAR_KEYWORD for p in parameters) else {p.name for p in list(parameters)[1:]}
        )

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        """See ``BaseRewardHandler.calculate_reward``."""
        is_video = to_numpy(images).ndim == 5
        samples = as_videos(images).transpose(0, 2, 3, 4, 1) if is_video else as_images(images)
        prompts = prompts_of(metadata, len(samples))
        key = self.score_keys[0]

        def score(index: int) -> dict[str, Any]:
            own = _sample_metadata(metadata, index, len(samples))
            info = own.get("video_infos")
            fps = info.get("video_fps", info.get("fps")) if isinstance(info, dict) else None
            keywords = {"reference": own.get("references"), "prompt": prompts[index], "metadata": own, "fps": fps}
            if self._takes is not None:
                keywords = {name: value for name, value in keywords.items() if name in self._takes}
            value = self._function(samples[index], **keywords)
            return {key: None if value is None else float(value)}

        result = score_samples((key,), len(samples), score)
        for index, value in enumerate(result["scores"][key]):
            if value is None:
                result["item_errors"].setdefault(index, f"{self._function.__name__} returned None")
        return result

    def provenance(self) -> dict[str, Any]:
        """Adds a digest of the file that defines the function."""
        source = inspect.getsourcefile(inspect.unwrap(self._function))
        name = f"{self._function.__module__}:{self._function.__qualname__}"
        return {**super().provenance(), "function": name, "model_digest": digest([source]) if source else None}


def function_handler(function: Callable[..., Any], reward_name: str) -> type[FunctionReward]:
    """A handler class of its own for one function; its score key is the reward's name."""
    members = {
        "reward_name": reward_name,
        "score_keys": (reward_name,),
        "OPTIONS": {},
        "wrapped": staticmethod(function),
        "__doc__": inspect.getdoc(function) or f"Calls {function.__name__} for each sample.",
    }
    return type(f"FunctionReward_{reward_name}", (FunctionReward,), members)


def load_function(place: str) -> Callable[..., Any]:
    """Import ``package.module:name`` or ``path/to/file.py:name``.

    Raises:
        NotReady: no such module, file or name, or it is not callable.
    """
    module_name, _, name = place.rpartition(":")
    if not module_name or not name:
        raise NotReady(f"reward_args.options.function: {place!r}; expected 'package.module:name' or 'file.py:name'")
    try:
        module = _load_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except ImportError as error:
        raise NotReady(f"reward_args.options.function: cannot import {module_name} ({error})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise NotReady(f"reward_args.options.function: {module_name} has no function {name}")
    return function


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise NotReady(f"reward_args.options.function: no file {path}")
    spec = importlib.util.spec_from_file_location(f"reward_function_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _sample_metadata(metadata: dict[str, Any], index: int, count: int) -> dict[str, Any]:
    return {k: v[index] if isinstance(v, list) and len(v) == count else v for k, v in metadata.items()}
