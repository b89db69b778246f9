"""Old names of configuration keys: most are still read, with one warning each."""

from collections.abc import MutableMapping

from cosmos_rl.utils.logging import logger

PRESENT_NAMES = {
    "policy.diffusers.lora": "policy.lora",
    "policy.lora.rank_pattern": "policy.lora.r_pattern",
    "policy.diffusers.timestep_fraction": "policy.diffusers.timesteps_fraction",
    "train.enable_validation": "validation.enable",
    "train.validation_step": "validation.freq",
    "train.validation_batch_per_replica": "validation.batch_size",
    "train.train_policy.load_balanced_max_steps": "train.max_num_steps",
    "train.train_policy.fully_on_policy": "train.train_policy.on_policy",
}
RENAMED = {"train.train_policy.watch": "train.train_policy.reward_hacking_guard"}
"""Old names that are errors."""
_warned: set[str] = set()


def rename_old_keys(tree: MutableMapping[str, object]) -> list[tuple[str, str]]:
    """Moves old keys of `tree` to their present places; returns (key, problem) where both names are used."""
    problems = []
    for old, new in PRESENT_NAMES.items():
        *table, leaf = old.split(".")
        holder = _table(tree, table, create=False)
        if holder is None or leaf not in holder:
            continue
        value = holder.pop(leaf)
        *table, leaf = new.split(".")
        target = _table(tree, table, create=True)
        if target is None or leaf in target:
            problems.append((old, f"given together with {new}, its present name; keep only {new}"))
            continue
        target[leaf] = value
        if old not in _warned:
            _warned.add(old)
            logger.warning("%s is an old name; write %s", old, new)
    return problems


def _table(tree: MutableMapping[str, object], path: list[str], *, create: bool) -> MutableMapping[str, object] | None:
    node: object = tree
    for name in path:
        if not isinstance(node, MutableMapping):
            return None
        node = node.setdefault(name, {}) if create else node.get(name)
    return node if isinstance(node, MutableMapping) else None
