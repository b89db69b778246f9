"""One of several ranks that train on a device which this machine does not have: for `train_on_ranks`.

The device is a second name of the CPU. What leaves it, or comes to it, is copied, and NaN stays behind: whoever still
reads the old memory finds that. Each rank writes what was on the device at each call of an encoder or a denoiser.
"""

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch

from cosmos_rl.checkpoint.layout import policy_dir
from cosmos_rl.distributed.context import Context, process_group
from cosmos_rl.policy.config import Config, load_config
from cosmos_rl.policy.config.jobs import job_kind, load_part
from cosmos_rl.policy.config.ranks import with_world_size
from cosmos_rl.policy.trainer.loop import TrainLoop
from cosmos_rl.storage.run_folder import RunFolder
from tests.support.trainer_runs import Stop, bundled_data

DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")


class Places(TorchFunctionMode):
    """Moves parameters and buffers for good, and knows where they are."""

    def __init__(self) -> None:
        super().__init__()
        self._place: dict[int, torch.device] = {}
        self._parts: dict[str, list[Tensor]] = {}
        self.log: list[list[str]] = []
        """(part that is called, parts on the device) as one list."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.to or len(args) != 4 or kwargs:  # as `Module.to` calls it
            return func(*args, **(kwargs or {}))
        source, place = args[0], args[1]
        if self._place.get(id(source)) == place:
            return source
        self._place[id(source)] = place
        moved = source.clone()
        with torch.no_grad():
            _spoil(source)
        return moved

    def watch(self, pipeline: Any) -> None:
        """Note the calls of the encoders and denoisers from now on."""
        for name, part in pipeline.components.items():
            if isinstance(part, nn.Module) and name.startswith(("text_encoder", "transformer")):
                self._parts[name] = list(part.parameters())
        for name in self._parts:
            part = getattr(pipeline, name)
            part.register_forward_pre_hook(lambda *_, name=name: self._note(name), prepend=True)

    def _note(self, name: str) -> None:
        present = [part for part, own in self._parts.items() if any(self._is_present(one) for one in own)]
        if self.log[-1:] != [[name, *present]]:
            self.log.append([name, *present])

    def _is_present(self, tensor: Tensor) -> bool:
        return self._place.get(id(tensor), DEVICE) == DEVICE


def _spoil(value: Any) -> None:
    """NaN, or zeros for whole numbers, in every tensor that it is made of."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if _python_dispatch.is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            _spoil(getattr(value, name))
    else:
        value.detach().fill_(float("nan") if value.is_floating_point() else 0)


def train(config: Config, context: Context, folder: Path, resume_step: int = 0) -> Places:
    """Train as this rank; what was where, if the device is the one that is not there."""
    resume_from = policy_dir(RunFolder(folder).checkpoints, resume_step) if resume_step else None
    places = Places()
    with places if context.device == DEVICE else contextlib.nullcontext():
        task = load_part(job_kind(config).task)(config, context, **bundled_data(config))
        places.watch(task.model.pipeline)
        task.model.encode_prompts(["one that the cache does not have"])
        assert TrainLoop(config, RunFolder(folder), context, task, (), {}, Stop()).run(resume_from) == 0
        task.close()
    return places


def main(config_file: str, folder: str, resume_step: str, *overrides: str) -> int:
    """A run of two steps on the CPU, the same one on the device, and one resumed after ``resume_step`` steps."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)

    def configure(name: str, steps: int) -> Config:
        options = [*overrides, f"--train.max_num_steps={steps}", f'--train.output_dir="{folder}/{name}"']
        return load_config(config_file, options, fit=lambda config: with_world_size(config, ranks))

    with process_group("cpu") as context:
        away, root = dataclasses.replace(context, device=DEVICE), Path(folder)
        train(configure("plain", 2), context, root / "plain")
        places = train(configure("apart", 2), away, root / "apart")
        if step := int(resume_step):
            train(configure("again", step), away, root / "again")
            train(configure("again", 2), away, root / "again", step)
    (root / f"rank_{context.rank}.json").write_text(json.dumps(places.log))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
