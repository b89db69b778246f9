"""Published settings of reinforcement learning by their names: dotted keys and values, under what a file says itself.

What depends on the weights that are trained or on the number of devices (learning rate, adapters, batch) is not in one.
"""

from collections.abc import Mapping
from typing import Any

_JOB = "train.train_policy"
_SAMPLE = "policy.diffusers.sample"

_FLOW_GRPO: Mapping[str, Any] = {
    f"{_JOB}.type": "grpo",
    f"{_JOB}.trainer_type": "flow_grpo",
    f"{_JOB}.on_policy": True,
    f"{_JOB}.epsilon_low": 1e-4,
    f"{_JOB}.kl_beta": 0.0,
    f"{_SAMPLE}.solver": "flow",
    f"{_SAMPLE}.noise_level": 0.7,
    f"{_SAMPLE}.deterministic_sampling": False,
    f"{_SAMPLE}.num_steps": 10,
    f"{_SAMPLE}.eval_num_steps": 40,
    f"{_SAMPLE}.guidance_scale": 1.0,
    "rollout.n_generation": 24,
}
_CPS: Mapping[str, Any] = {
    f"{_JOB}.logprob_weight": "unit",
    f"{_JOB}.epsilon_low": 1e-5,
    f"{_SAMPLE}.solver": "cps",
    f"{_SAMPLE}.noise_level": 0.8,
}
_WINDOW: Mapping[str, Any] = {
    f"{_JOB}.steps.choose": "window",
    f"{_JOB}.steps.size": 3,
    f"{_JOB}.steps.within": 0.5,
    f"{_JOB}.steps.elsewhere": "euler",
}
_DPPO: Mapping[str, Any] = {
    **_FLOW_GRPO,
    f"{_JOB}.kl_mask_threshold": 1e-5,
    f"{_JOB}.steps.choose": "random",
    f"{_JOB}.steps.within": 0.5,
    f"{_JOB}.steps.elsewhere": "euler",
    "policy.diffusers.timesteps_fraction": 0.3,
    "rollout.n_generation": 16,
}
_GROUPS: Mapping[str, Any] = {
    **_FLOW_GRPO,
    f"{_SAMPLE}.global_std": False,
    f"{_SAMPLE}.same_initial_noise": True,
    "rollout.n_generation": 12,
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Liu et al. 2025, arXiv 2505.05470, as their code trains Stable Diffusion 3.5 medium
    "flow_grpo": {
        **_FLOW_GRPO,
        f"{_JOB}.kl_beta": 0.04,
        f"{_SAMPLE}.guidance_scale": 4.5,
        "policy.diffusers.timesteps_fraction": 0.99,
    },
    # the same authors' code: noise in a short window of the first half
    "flow_grpo_fast": {**_FLOW_GRPO, **_CPS, **_WINDOW},
    "flow_grpo_fast_sde": {**_FLOW_GRPO, **_WINDOW, f"{_JOB}.epsilon_low": 1e-5},
    # Wang and Yu 2025, arXiv 2509.05952
    "flow_cps": {**_FLOW_GRPO, **_CPS},
    # arXiv 2510.22319
    "grpo_guard": {**_FLOW_GRPO, f"{_JOB}.logprob_weight": "guard", f"{_JOB}.epsilon_low": 2e-6},
    # arXiv 2606.11025
    "flow_dppo": _DPPO,
    "flow_dppo_cps": {**_DPPO, f"{_SAMPLE}.solver": "cps", f"{_SAMPLE}.noise_level": 0.8},
    # Xue et al. 2025, arXiv 2505.07818
    "dance_grpo": {
        **_GROUPS,
        f"{_SAMPLE}.solver": "dance",
        f"{_SAMPLE}.noise_level": 0.3,
        f"{_SAMPLE}.num_steps": 16,
        f"{_JOB}.steps.choose": "random",
        "policy.diffusers.timesteps_fraction": 0.6,
    },
    # arXiv 2507.21802
    "mix_grpo": {
        **_GROUPS,
        f"{_SAMPLE}.num_steps": 25,
        f"{_JOB}.normalise_rewards": "each",
        f"{_JOB}.steps.choose": "window",
        f"{_JOB}.steps.size": 4,
        f"{_JOB}.steps.order": "progressive",
        f"{_JOB}.steps.stride": 1,
        f"{_JOB}.steps.interval": 25,
        f"{_JOB}.steps.roll_back": True,
        f"{_JOB}.steps.elsewhere": "euler",
    },
    # arXiv 2512.04332; the weight of the data is to be tuned
    "ddrl": {
        **_FLOW_GRPO,
        f"{_JOB}.trainer_type": "ddrl",
        f"{_JOB}.advantage_transform": "centred_exp_reward",
        f"{_JOB}.steps.choose": "list",
        f"{_JOB}.steps.indices": list(range(0, 19, 2)),
        f"{_SAMPLE}.num_steps": 20,
        f"{_SAMPLE}.global_std": False,
        "rollout.n_generation": 8,
    },
}


def fill_in_preset(values: Any) -> Any:
    """The tables of a file with what the preset that they name says where they say nothing."""
    name: Any = values
    for key in ("train", "train_policy", "preset"):
        if not isinstance(name, Mapping):
            return values
        name = name.get(key)
    if not isinstance(name, str) or name not in PRESETS:
        return values  # the key itself is refused
    preset: dict[str, Any] = {}
    for dotted, value in PRESETS[name].items():
        *tables, key = dotted.split(".")
        table = preset
        for part in tables:
            table = table.setdefault(part, {})
        table[key] = value
    return _merge(preset, values)


def _merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**under, **over}
    for key, value in under.items():
        if isinstance(value, Mapping) and isinstance(over.get(key), Mapping):
            merged[key] = _merge(value, over[key])
    return merged
