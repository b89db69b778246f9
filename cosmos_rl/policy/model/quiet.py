"""Silences the progress bars and needless warnings of the libraries while they load or save a pipeline."""

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cosmos_rl.data.text_lengths import TextEncoder, build_encoder, find_refusal
from cosmos_rl.storage.weight_files import open_weights


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """No progress bars of the libraries: ours is the only progress that a log should hold."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        diffusers_logging.enable_progress_bar()
        transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def quiet_warnings() -> Iterator[None]:
    """Only errors of the libraries. They print the whole text that an encoder cuts, at every call."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    modules = (diffusers_logging, transformers_logging)
    before = [module.get_verbosity() for module in modules]
    for module in modules:
        module.set_verbosity_error()
    try:
        yield
    finally:
        for module, verbosity in zip(modules, before, strict=True):
            module.set_verbosity(verbosity)


def mute_unused_guidance(pipeline: Any) -> None:
    """Have a pipeline not say at every call that its negative prompt or its guidance is not used: training means it."""
    logging.getLogger(type(pipeline).__module__).addFilter(_says_something_else)


def _says_something_else(record: logging.LogRecord) -> bool:
    return "classifier-free guidance is not enabled" not in record.getMessage()


def mute_torchao() -> None:
    """Have torch not log, when torchao is imported, in which of its own ways torchao registers constants."""
    logging.getLogger("torch.utils._pytree").addFilter(_says_nothing_of_constants)


def _says_nothing_of_constants(record: logging.LogRecord) -> bool:
    return "register_constant() on Enum subclasses is deprecated" not in record.getMessage()


def build_text_encoders(tokenizers: Iterable[Any], limit: int) -> list[TextEncoder]:
    """What counts tokens as the loaded tokenizers do; ``limit`` is the configured length."""

    def build_counter(tokenizer: Any) -> TextEncoder:
        def lengths(texts: Sequence[str]) -> list[int]:
            return [len(ids) for ids in tokenizer(list(texts), verbose=False)["input_ids"]]

        return build_encoder(
            type(tokenizer).__name__, int(getattr(tokenizer, "model_max_length", limit)), limit, lengths
        )

    # data workers are forked, in which the parallel mode of tokenizers does not work; it warns of that each time
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    found = [build_counter(tokenizer) for tokenizer in tokenizers]
    return [
        encoder for encoder in found if find_refusal("a", [encoder]) is None
    ]  # a user's class may hold something else


def load_adapter(pipe: Any, folder: Path) -> None:
    """Load and use an exported adapter."""
    load_adapter_weights(pipe, folder)
    owner = pipe if hasattr(pipe, "set_adapters") else pipe.transformer
    owner.set_adapters("default")


def load_adapter_weights(pipe: Any, folder: Path) -> None:
    """Load an exported adapter. Its text encoders have no part of it, of which diffusers warns each time.

    A pipeline with two denoisers has an adapter of the second one in a folder of its name.

    Raises:
        UserError: a file of it is cut off.
    """
    names: dict[str, Any] = {"weight_name": "model.safetensors", "adapter_name": "default"}
    second = folder / "transformer_2"
    for place in (folder, second):
        if (place / names["weight_name"]).is_file():
            with open_weights(place / names["weight_name"]):  # diffusers' own error has a traceback and no remedy
                pass
    with quiet_warnings():
        if not hasattr(pipe, "load_lora_weights"):  # some pipelines leave it to the denoiser
            pipe.transformer.load_lora_adapter(str(folder), prefix="transformer", **names)
            return
        if (folder / names["weight_name"]).is_file() or not second.is_dir():
            pipe.load_lora_weights(str(folder), **names)
        if second.is_dir():
            pipe.load_lora_weights(str(second), load_into_transformer_2=True, **names)
