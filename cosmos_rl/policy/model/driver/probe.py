"""The gate: what is found out about a pipeline by running it, and the checks that prove it may be driven.

All of it happens before any training, at a small size. A check that fails is a `UserError` that names it.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.driver import facts as facts_file
from cosmos_rl.policy.model.driver.checks import CHECKS, find_guidance
from cosmos_rl.policy.model.driver.driver import Driver
from cosmos_rl.policy.model.driver.facts import Check, Facts
from cosmos_rl.policy.model.driver.media_checks import MEDIA_CHECKS
from cosmos_rl.policy.model.driver.probing import Failed, Probing
from cosmos_rl.policy.model.driver.untouched import collect_random_states, eval_mode, not_degenerate
from cosmos_rl.policy.model.quiet import quiet_warnings

PROMPTS = ("a photo of a cat", "two circles (très odd!)")


def prove(
    driver: Driver,
    *,
    prompts: tuple[str, ...] = PROMPTS,
    cache: Path | None = None,
    again: bool = False,
    report: Callable[[Check], None] = lambda check: None,
) -> Facts:
    """Fill ``driver.facts``: from the cache, else by running all checks.

    Args:
        prompts: at least two different ones.
        cache: folder of facts; None: neither read nor written.
        again: run the checks even if the cache has their result.
        report: is called with every check that has passed.

    Raises:
        UserError: a check failed; its name and what to do are in the message.
    """
    import diffusers

    key = facts_file.cache_key(driver.pipeline, driver.call, driver.size)
    known = None
    if cache is not None and not again:
        known = facts_file.load(cache, key)
    if known is not None:
        driver.facts = known
        for check in known.checks:
            report(check)
        return known
    driver.facts.diffusers, driver.facts.size = diffusers.__version__, driver.size
    probing = Probing(driver, list(prompts), driver.facts)
    before = collect_random_states()
    with contextlib.ExitStack() as undo:
        undo.enter_context(quiet_warnings())
        for module in driver.denoisers.values():
            undo.enter_context(eval_mode(module))
        for check in CHECKS:
            if check is find_guidance:  # the checks before it do not look at what the denoiser computes
                undo.enter_context(not_degenerate(probing))
            _run_check(check, probing, report)
        if driver.row.media is not None:
            for check in MEDIA_CHECKS:
                _run_check(check, probing, report)
    _run_check(_leaves_random_states(before), probing, report)
    if cache is not None:
        facts_file.save(cache, key, driver.facts)
    return driver.facts


def _run_check(check: Callable[[Probing], str], probing: Probing, report: Callable[[Check], None]) -> None:
    assert check.__doc__ is not None
    name, _, advice = (part.strip() for part in check.__doc__.partition("\n"))
    try:
        passed = Check(name.rstrip("."), check(probing))
    except (MemoryError, torch.OutOfMemoryError):
        raise  # says nothing about the pipeline
    except (Failed, UserError) as error:
        raise _refusal(probing, name, str(error), advice) from None
    except Exception as error:  # stock code may raise anything when it is not as we think it is
        said = (str(error).splitlines() or [""])[0]
        raise _refusal(probing, name, f"{type(error).__name__}: {said}", advice) from error
    probing.facts.checks.append(passed)
    report(passed)


def _refusal(probing: Probing, name: str, detail: str, advice: str) -> UserError:
    advice = " ".join(advice.split())
    return UserError(
        f'{probing.facts.pipeline} cannot be driven: the check "{name.rstrip(".")}" failed: {detail.rstrip(".")}.'
        + (f" {advice}" if advice else "")
        + " docs/models.md explains the checks, docs/new-model.md how to write a model class instead."
    )


def _leaves_random_states(before: list[Any]) -> Callable[[Probing], str]:
    def check(_: Probing) -> str:
        """The global random states were not touched

        The pipeline draws random numbers outside of the generator it is given.
        """
        if collect_random_states() != before:
            raise Failed("torch, NumPy or Python's random module has drawn")
        return "torch, NumPy, random"

    return check
