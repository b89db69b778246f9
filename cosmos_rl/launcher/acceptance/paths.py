"""Local paths of a configuration, made absolute: what is written into a run folder must lead there from anywhere."""

from pathlib import Path

from cosmos_rl.checkpoint.layout import find_checkpoint
from cosmos_rl.policy.config import Config
from cosmos_rl.policy.config.keys import with_values

_PLACES = ("local_dir", "rejected_dir", "lora_path", "model_name_or_path", "single_file_base", "teacher")
"""Keys that may hold a path, whatever their table."""


def with_absolute_paths(config: Config) -> Config:
    """The configuration whose paths lead to the same places from any folder."""
    return with_values(config, _absolute)


def _absolute(key: str, value: object) -> object:
    if not isinstance(value, str) or not value:
        return value
    name, path = key.rpartition(".")[2], Path(value).expanduser()
    if key == "train.output_dir" or (name in _PLACES and path.exists()):
        return str(path.absolute())
    if key == "train.resume":  # now, as the links of the output folder will lead to the new run once it begins
        return str(find_checkpoint(path))
    if name == "function":
        return _absolute_function(value)
    return value


def _absolute_function(place: str) -> str:
    """`my_reward.py:red` leads to the same function from any folder."""
    file, _, name = place.rpartition(":")
    if not file.endswith(".py"):
        return place
    return f"{Path(file).expanduser().absolute()}:{name}"
