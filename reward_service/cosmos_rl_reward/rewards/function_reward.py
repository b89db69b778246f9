"""A plain Python function as a reward: ``function = "module:name"`` in the configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from cosmos_rl_reward.handler import BaseRewardHandler
from cosmos_rl_reward.handler.base import digest
from cosmos_rl_reward.payload.metadata import find_per_item
from cosmos_rl_reward.rewards.samples import as_images, as_videos, get_per_sample, score_samples, to_numpy


def function_handler(function: Callable[..., Any], reward_name: str) -> type[BaseRewardHandler]:
    """A handler class for one function.

    A function whose first two parameters are ``images, metadata`` is called once for the whole request, as
    ``BaseRewardHandler.calculate_reward`` is, and returns a list of B numbers, or a table of such lists. Any other is
    called for each sample::

        function(to_be_evaluated, reference=None, **kw) -> float | None

    ``to_be_evaluated`` is uint8 ``[H, W, 3]`` for an image and ``[T, H, W, 3]`` for a video; ``reference`` the sample's
    entry of ``metadata.references`` (or ``reference``); keywords are ``prompt``, ``metadata`` (the request's metadata,
    lists with one entry per sample cut down to this sample's) and ``fps`` (of a video, when it was sent). A function
    that takes fewer keywords gets fewer. None means that the sample has no score.

    The attribute ``reward_version`` of the function, if any, is the reward's.
    """
    whole = [*inspect.signature(function).parameters][:2] == ["images", "metadata"]
    members = {
        "reward_name": reward_name,
        "score_keys": (reward_name,),
        "reward_version": str(getattr(function, "reward_version", "1")),
        "function": staticmethod(function),
        "__doc__": inspect.getdoc(function) or f"Calls {getattr(function, '__name__', reward_name)}.",
    }
    base: Any = _WholeRequest if whole else _EachSample
    return type(f"FunctionReward_{reward_name}", (base,), members)


class _FunctionReward(BaseRewardHandler):
    array_type = "numpy"
    function: ClassVar[Callable[..., Any]]

    def provenance(self) -> dict[str, Any]:
        """Adds the function's name and a digest of the file that defines it."""
        function = inspect.unwrap(self.function)
        try:
            source = inspect.getsourcefile(function)
        except TypeError:  # a built-in, or an object that is called
            source = None
        name = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"
        return {**super().provenance(), "function": name, "model_digest": digest([source]) if source else None}


class _WholeRequest(_FunctionReward):
    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        values = self.function(images, metadata)
        return {"scores": values if isinstance(values, dict) else {self.reward_name: list(values)}}


class _EachSample(_FunctionReward):
    def set_up(self) -> None:
        """Find out which keywords the function takes."""
        parameters = list(inspect.signature(self.function).parameters.values())
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._takes = None if takes_all else {p.name for p in parameters[1:]}

    def calculate_reward(self, images: Any, metadata: dict[str, Any]) -> dict[str, Any]:
        is_video = to_numpy(images).ndim == 5
        samples = as_videos(images).transpose(0, 2, 3, 4, 1) if is_video else as_images(images)
        prompts = get_per_sample(metadata, "prompts", len(samples))

        def score(index: int) -> dict[str, Any]:
            own = _select_sample(metadata, index, len(samples))
            info = own.get("video_infos")
            fps = info.get("video_fps", info.get("fps")) if isinstance(info, dict) else None
            reference = own.get("references")
            if reference is None:
                reference = own.get("reference")
            keywords = {"reference": reference, "prompt": prompts[index], "metadata": own, "fps": fps}
            if self._takes is not None:
                keywords = {name: value for name, value in keywords.items() if name in self._takes}
            value = self.function(samples[index], **keywords)
            return {self.reward_name: None if value is None else float(value)}

        result = score_samples((self.reward_name,), len(samples), score)
        for index, value in enumerate(result["scores"][self.reward_name]):
            if value is None:
                result["item_errors"].setdefault(index, "the function returned None")
        return result


def _select_sample(metadata: dict[str, Any], index: int, count: int) -> dict[str, Any]:
    return {**metadata, **{name: metadata[name][index] for name in find_per_item(metadata, count)}}
