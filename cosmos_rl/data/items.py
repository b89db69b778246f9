"""What travels from the data room to the trainer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_rl.data.picture_sizes import Measured
from cosmos_rl.data.text_lengths import Named, TextEncoder, find_refusal
from cosmos_rl.data.texts import find_text_problem, printable
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config.buckets import Sides


class BadSample(UserError):
    """A sample that cannot be read. Training may leave it out; other errors of a data set end the run."""

    file: str = ""
    """What is broken, where it is a file: it counts once, however many samples name it."""


@dataclass(frozen=True)
class Item:
    """One training sample."""

    visual: Tensor
    """Image ``[3, H, W]`` (video: ``[3, T, H, W]``), float32 in [-1, 1]; without elements where ``latent`` is given."""
    prompt: str
    name: str = ""
    """For messages: the file's stem, or the position in a user's data set."""
    fps: float | None = None
    """Frames per second of a video, where it is known."""
    source: str | None = None
    """Which file and which frames of it were decoded, and how, where that is known without decoding."""
    latent: Tensor | None = None
    """What the VAE made of it, where a cache holds that."""
    edits: Path | None = None
    """The image that it was made of, for models that edit images."""
    weight: float = 1.0
    """Factor on its loss."""
    rejected: "Item | None" = None
    """Of a preference: the sample that was rejected for the same prompt."""


def take(dataset: Any, index: int, sample_id: int | None) -> Any:
    """An element of any data set.

    A data set with a method ``take(index, sample_id)`` may draw something for each global position ``sample_id`` of the
    run, as the first frame of a video; None asks for the same at every call.
    """
    method = getattr(dataset, "take", None)
    if method is None:
        return dataset[index]
    return method(index, sample_id)


def identify(dataset: Any, index: int, sample_id: int | None) -> Item | None:
    """An element without its image or video, which is not decoded; None: the data set cannot say what it is.

    A data set with a method ``identify(index, sample_id)`` gives an `Item` with ``source``.
    """
    method = getattr(dataset, "identify", None)
    if method is None:
        return None
    return method(index, sample_id)


class Part(Sequence[Any]):
    """The elements ``first`` ... ``last - 1`` of a data set, or those at ``chosen``, in that order."""

    def __init__(
        self, dataset: Sequence[Any], first: int = 0, last: int = 0, *, chosen: Sequence[int] | None = None
    ) -> None:
        self._dataset = dataset
        self._range: Sequence[int] = range(first, last)
        self._place = f"{first}:{last}"
        if chosen is not None:
            self._range, self._place = chosen, ",".join(map(str, chosen))

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, index: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.take(index, None)

    def take(self, index: int, sample_id: int | None) -> Any:
        """See the function of that name."""
        return take(self._dataset, self._range[index], sample_id)

    def identify(self, index: int, sample_id: int | None) -> Item | None:
        """See the function of that name."""
        return identify(self._dataset, self._range[index], sample_id)

    @property
    def first_index_of(self) -> Callable[[int], int] | None:
        """What gives one number to all elements that are the same sample, where the data set has such elements."""
        find = getattr(self._dataset, "first_index_of", None)
        return find and (lambda index: find(self._range[index]))

    @property
    def bucket_of(self) -> Callable[[int], Sides] | None:
        """What says at which size an element comes out, where the data set knows it."""
        bucket_of = getattr(self._dataset, "bucket_of", None)
        return bucket_of and (lambda index: bucket_of(self._range[index]))

    @property
    def measure(self) -> Callable[[int], Measured] | None:
        """What measures an element's file, where the data set knows it."""
        measure = getattr(self._dataset, "measure", None)
        return measure and (lambda index: measure(self._range[index]))

    @property
    def prompts(self) -> list[str] | None:
        """The captions, where the data set knows them without decoding."""
        prompts = getattr(self._dataset, "prompts", None)
        if prompts is None:
            return None
        return [prompts[i] for i in self._range]

    @property
    def names(self) -> list[str] | None:
        """What messages call the elements."""
        names = getattr(self._dataset, "names", None)
        if names is None:
            return None
        return [names[i] for i in self._range]

    @property
    def edited(self) -> list[str] | None:
        """The images that the captions name to be edited, where the data set knows them."""
        edited = getattr(self._dataset, "edited", None)
        if edited is None:
            return None
        return [edited[i] for i in self._range]

    @property
    def digest(self) -> str | None:
        """Of names and captions, where the data set knows it."""
        whole = getattr(self._dataset, "digest", None)
        return whole and f"{whole}[{self._place}]"


def list_captions(dataset: Any) -> list[Named]:
    """(name, caption) of every element of a data set that knows its captions without decoding; else nothing."""
    prompts = getattr(dataset, "prompts", None) or ()
    names = getattr(dataset, "names", None) or [f"element {i}" for i in range(len(prompts))]
    return list(zip(names, prompts, strict=True))


class Wrapped(Sequence[Any]):
    """A data set of which each element is changed or made otherwise when it is taken."""

    def __init__(self, dataset: Sequence[Any]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.take(index, None)

    def take(self, index: int, sample_id: int | None) -> Any:
        """See the function of that name."""
        return take(self._dataset, index, sample_id)

    @property
    def first_index_of(self) -> Callable[[int], int] | None:
        """What gives one number to all elements that are the same sample, where the data set has such elements."""
        return getattr(self._dataset, "first_index_of", None)

    @property
    def prompts(self) -> Sequence[str] | None:
        """The captions, where the data set knows them without decoding."""
        return getattr(self._dataset, "prompts", None)

    @property
    def digest(self) -> str | None:
        """Of names and captions, where the data set knows it."""
        return getattr(self._dataset, "digest", None)


class Readable(Wrapped):
    """A data set whose captions went through the tokenizers when an element is taken: each distinct one once."""

    def __init__(self, dataset: Sequence[Any], encoders: Sequence[TextEncoder]) -> None:
        super().__init__(dataset)
        self._encoders = encoders
        self._right: set[str] = set()

    def take(self, index: int, sample_id: int | None) -> Item:
        """See the function of that name."""
        item = to_item(take(self._dataset, index, sample_id), index)
        if item.prompt not in self._right:
            why = self.find_refusal(item.prompt)
            if why is not None:
                raise BadSample(f"caption of {printable(item.name)}: {why}")
            self._right.add(item.prompt)
        return item

    def find_refusal(self, prompt: str) -> str | None:
        """Why a tokenizer does not take the caption; None: all take it."""
        return find_refusal(prompt, self._encoders)


def to_item(raw: Any, index: int) -> Item:
    """An element of any data set -> ``Item``. A user's data set may return mappings with ``visual`` and ``prompt``, and
    for preferences with ``rejected``, a second visual.

    Raises:
        BadSample: no tokenizer would take its prompt.
        UserError: the element has another form.
    """
    if isinstance(raw, Item):
        _check_text(raw.prompt, index)
        return raw
    if not isinstance(raw, Mapping) or not {"visual", "prompt"} <= set(raw):
        found: Any = type(raw).__name__
        if isinstance(raw, Mapping):
            found = sorted(raw)
        raise UserError(f"data set element {index}: need a mapping with 'visual' and 'prompt', found {found}")
    prompt = raw["prompt"]
    visual = _check_visual(raw, "visual", index)
    if not isinstance(prompt, str):
        raise UserError(f"data set element {index}: 'prompt' must be a string, found {type(prompt).__name__}")
    _check_text(prompt, index)
    item = Item(visual, prompt, str(raw.get("name", index)), raw.get("fps"))
    if raw.get("rejected") is None:
        return item
    return replace(item, rejected=replace(item, visual=_check_visual(raw, "rejected", index)))


def _check_visual(raw: Mapping[str, Any], key: str, index: int) -> Tensor:
    visual = raw[key]
    if not isinstance(visual, Tensor) or visual.ndim not in (3, 4) or not visual.is_floating_point():
        raise UserError(
            f"data set element {index}: '{key}' must be a float tensor [3, H, W] or [3, T, H, W] in [-1, 1]"
        )
    largest = float(visual.detach().abs().max()) if visual.numel() else 0.0
    if not largest <= 1.01:  # NaN is refused too
        raise UserError(f"data set element {index}: '{key}' must be in [-1, 1], its largest magnitude is {largest:g}")
    return visual.to(torch.float32)


def _check_text(prompt: str, index: int) -> None:
    problem = find_text_problem(prompt)
    if problem is not None:
        raise BadSample(f"data set element {index}: 'prompt' {problem}")
