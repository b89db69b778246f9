"""Keys of reinforcement learning that are set and do not act, as the trainer or another key has it."""

from collections.abc import Iterator, Sequence

from cosmos_rl.policy.config.jobs import job_kind, online_table
from cosmos_rl.policy.config.keys import list_keys
from cosmos_rl.policy.config.plan import PAIR_TRAINERS, STEP_TRAINERS, keeps_reference
from cosmos_rl.policy.config.presets import PRESETS
from cosmos_rl.policy.config.problems import format_value
from cosmos_rl.policy.config.schema import Config
from cosmos_rl.policy.config.steps import StepsConfig
from cosmos_rl.policy.config.train_policy import GrpoPolicyConfig

_JOB = "train.train_policy"
_GUARD = f"{_JOB}.reward_hacking_guard"
_CLIP = (f"{_JOB}.epsilon_low", f"{_JOB}.epsilon_high")
_DIRECTION = f"{_JOB}.kl_mask_direction"
_OF_STEPS = (
    f"{_JOB}.steps.",
    *_CLIP,
    f"{_JOB}.kl_mask_threshold",
    _DIRECTION,
    f"{_JOB}.logprob_weight",
    f"{_JOB}.advantage_transform",
)
_MOVES = tuple(f"{_JOB}.steps.{name}" for name in ("stride", "interval", "roll_back"))
_DECAYS = {
    f"{_JOB}.steps.least_interval": "decay",
    f"{_JOB}.steps.decay_rate": "exp_decay",
    f"{_JOB}.steps.decay_threshold": "exp_decay",
}
"""Keys of one order of a window."""
_Idle = tuple[str, Sequence[str]]
"""The setting for which keys do not act, and their names; of tables, and of keys that begin alike, the beginning."""


def idle_notes(config: Config) -> Iterator[str]:
    """A line for each setting that keeps keys of the file from acting; what a preset sets is not the file's."""
    kind = job_kind(config)
    if not (kind.online and kind.supported and config.policy.is_diffusers):
        return
    job = online_table(config)
    preset = PRESETS.get(job.preset or "", {})
    changed = [key.path for key in list_keys(config) if _frozen(preset.get(key.path, key.default)) != key.value]
    for setting, names in [*_by_trainer(job), *_by_key(config, job)]:
        idle = [path for path in changed if any(path == name or _is_within(path, name) for name in names)]
        if idle:
            yield f"Keys that do not act with {setting}: {', '.join(idle)}"


def _frozen(value: object) -> object:
    """As a configuration holds it."""
    return tuple(value) if isinstance(value, list) else value


def _is_within(path: str, name: str) -> bool:
    return name.endswith(".") and path.startswith(name)


def _by_trainer(job: GrpoPolicyConfig) -> Iterator[_Idle]:
    """Keys of other trainers."""
    names: list[str] = []
    if job.trainer_type not in STEP_TRAINERS:
        names += _OF_STEPS
    if job.trainer_type not in PAIR_TRAINERS:
        names.append(f"{_JOB}.dpo_beta")
    else:
        names += _unread_advantages(job)
    if job.trainer_type != "diffusion_nft":
        names.append("policy.diffusers.nft_beta")
    yield f"{_JOB}.trainer_type = {format_value(job.trainer_type)}", names


def _unread_advantages(job: GrpoPolicyConfig) -> Iterator[str]:
    """Keys of advantages that leave the best and the worst sample of each prompt the same."""
    if not job.drop_equal_groups:  # which looks at the advantages as they are used
        yield from (f"{_JOB}.advantage_{name}" for name in ("low", "high", "mode"))
    if job.normalise_rewards == "sum":
        yield f"{_JOB}.advantage_temperature"


def _by_key(config: Config, job: GrpoPolicyConfig) -> Iterator[_Idle]:
    """Keys that another key switches off."""
    guard, diffusers = job.reward_hacking_guard, config.policy.diffusers
    if job.trainer_type in STEP_TRAINERS:
        yield from _of_steps(job.steps)
        if job.kl_mask_threshold is None:
            yield f"{_JOB}.kl_mask_threshold unset", [_DIRECTION]
        else:
            yield f"{_JOB}.kl_mask_threshold = {format_value(job.kl_mask_threshold)}", _CLIP
        if job.on_policy:
            yield f"{_JOB}.on_policy = true", ["policy.diffusers.weight_copy_decay_type"]
    if job.data_term.beta == 0:
        yield f"{_JOB}.data_term.beta = 0", [f"{_JOB}.data_term."]
    if not keeps_reference(job):
        yield f"{_JOB}.kl_beta = 0", [f"{_JOB}.reference_reset_interval"]
    if not job.kl_gate.rewards:
        yield f"{_JOB}.kl_gate.rewards = []", [f"{_JOB}.kl_gate."]
    if not guard.enable:
        yield f"{_GUARD}.enable = false", [f"{_GUARD}.{name}" for name in type(guard).model_fields if name != "enable"]
    elif guard.action != "rewind":
        names = ("max_rewinds", "rewind_lr_factor", "rewind_kl_factor")
        yield f"{_GUARD}.action = {format_value(guard.action)}", [f"{_GUARD}.{name}" for name in names]
    if job.advantage_temperature is not None and not diffusers.sample.global_std:
        yield f"{_JOB}.advantage_temperature", ["policy.diffusers.sample.global_std"]


def _of_steps(steps: StepsConfig) -> Iterator[_Idle]:
    """What chooses the trained sampling steps by another rule than the one that holds."""
    key = f"{_JOB}.steps"
    names: list[str] = []
    if steps.choose != "list":
        names.append(f"{key}.indices")
    if steps.choose != "window":
        names += [f"{key}.size", f"{key}.order", *_DECAYS, *_MOVES]
    if steps.choose in ("first", "list"):
        names.append(f"{key}.within")
    if steps.choose in ("list", "window"):
        names.append("policy.diffusers.timesteps_fraction")
    yield f"{key}.choose = {format_value(steps.choose)}", names
    if steps.choose == "window":
        moves = _MOVES if steps.order == "random" else ()
        decays = [name for name, order in _DECAYS.items() if order != steps.order]
        yield f"{key}.order = {format_value(steps.order)}", [*decays, *moves]
