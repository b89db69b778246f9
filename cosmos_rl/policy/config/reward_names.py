"""Names of rewards, as metrics show them: which there are, which of the sets' there are not, which are there twice."""

from collections.abc import Iterator

from cosmos_rl.policy.config.jobs import job_kind, online_table
from cosmos_rl.policy.config.prompt_sets import find_reward_problems
from cosmos_rl.policy.config.reward import LocalRewardConfig, RemoteRewardConfig
from cosmos_rl.policy.config.schema import Config
from cosmos_rl.policy.config.validation_sets import list_validation_sets, requested_table, unknown_rewards


def list_rewards(config: Config) -> dict[str, float]:
    """Name -> scale times weight of every reward that the configuration of an online job asks for."""
    job, found = online_table(config), dict[str, float]()
    local, remote = job.local_reward, job.remote_reward
    if job.use_remote_reward and remote.scale:
        named = zip(remote.shown_names, remote.reward_fns, strict=True)
        found = {name: remote.scale * entry.weight for name, entry in named if name is not None}
    return {**found, **{entry.shown_name: local.scale * entry.weight for entry in local.reward_fns}}


def reward_rules(config: Config) -> Iterator[str]:
    """Of runs of any job without a script of the user's, which may give rewards of its own: rewards of sets that the
    configuration does not have, and rewards that all count nothing."""
    if not job_kind(config).online or online_table(config).bypass_reward:  # then nothing is asked, and a note says so
        return
    job, known = online_table(config), list_rewards(config)
    named = [entry.name for entry in job.remote_reward.reward_fns if job.use_remote_reward]
    named += [entry.shown_name for entry in job.local_reward.reward_fns]
    if not any(known.values()):
        if named:  # else the launcher says that there is none, and how to name one
            yield (
                f"train.train_policy: all its rewards have weight 0 or scale 0 ({', '.join(named)}), so there is "
                "nothing to train on; allowed: one at least that counts, or bypass_reward = true"
            )
        return
    yield from find_reward_problems(online_table(config).dataset.sets, known)
    yield from unknown_rewards(config)


def repeated_names(config: Config) -> Iterator[str]:
    """Tables of an online job in which a function has the name of a score of the service.

    Two scores of one reward are named with their score keys, and a function may have the reward's name then.
    """
    job, key = online_table(config), "train.train_policy.local_reward"
    yield from _repeated(key, job.local_reward, job.remote_reward if job.use_remote_reward else None)
    for one in list_validation_sets(config):
        validation, remote = one.config.validation, requested_table(one.config)
        if validation.local_reward is None and remote is job.remote_reward:
            continue  # both as in training
        place = key if validation.local_reward is None else f"{one.key}.local_reward"
        yield from _repeated(place, validation.local_reward or job.local_reward, remote)


def _repeated(key: str, local: LocalRewardConfig, remote: RemoteRewardConfig | None) -> Iterator[str]:
    asked = [name for name in remote.shown_names if name] if remote is not None and remote.scale else []
    if both := sorted({entry.shown_name for entry in local.reward_fns}.intersection(asked)):
        yield f'{key}.reward_fns: found the name "{both[0]}", which remote_reward also has; allowed: another name'
