"""The other side of the comparison: the public call of the pipeline, with nothing of ours in it."""

from typing import Any

import torch
from torch import Tensor

from cosmos_rl.policy.model.driver.contract import Medium, Rollout
from cosmos_rl.policy.model.driver.driver import Driver
from cosmos_rl.policy.model.driver.seams import fresh_copy


@torch.no_grad()
def stock_run(
    driver: Driver,
    prompts: list[str],
    guidance: float | None,
    generators: list[torch.Generator],
    medium: Medium | None = None,
) -> Rollout:
    """The public stock call with nothing in it but a scheduler that notes what its step gets.

    ``medium``: of a single prompt.
    """
    pipeline, scheduler = driver.pipeline, fresh_copy(driver.scheduler)
    seen: list[tuple[Tensor, Tensor]] = []
    stock_step = scheduler.step

    def step(model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((sample.clone(), model_output.clone()))
        return stock_step(model_output, timestep, sample, *args, **kwargs)

    scheduler.__dict__["step"] = step
    proxy = object.__new__(type(pipeline))
    quiet = {"disable": True}
    proxy.__dict__.update({**vars(pipeline), "scheduler": scheduler, "_progress_bar_config": quiet})
    arguments = driver.arguments(len(prompts), guidance, driver.size, prompts, medium=medium)
    drawn: Any = generators
    if medium is not None:
        (drawn,) = generators  # with a list some pipelines want a list of media, too
    result = proxy(**arguments, generator=drawn, output_type="pt")[0]
    return Rollout(result, [x for x, _ in seen], [], [v for _, v in seen])
