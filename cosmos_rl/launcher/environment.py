"""What a configuration needs outside of itself, looked at before a run folder is made and before torch is loaded."""

import ast
import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from cosmos_rl.checkpoint.layout import find_checkpoint
from cosmos_rl.data.pair_files import load_pairs
from cosmos_rl.data.prompt_sets import prompt_file
from cosmos_rl.data.prompts import check_sampling, find_unused_keys, is_prompt_file, read_prompts
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config, GrpoPolicyConfig, LocalRewardConfig, LocalRewardFnConfig
from cosmos_rl.policy.model.single_file import find_single_file_problem
from cosmos_rl.reward.access import find_missing_access
from cosmos_rl.tracking.loggers import require_installed

_HUB_TIMEOUT_S = 5.0
DataForm = Literal["pairs", "prompts"]
"""Captioned images, or a list of prompts."""


def check_environment(config: Config, data: DataForm | None) -> list[str]:
    """Raise `UserError` with all folders and files that are named and are not there, or hold no usable data.

    Args:
        config: a checked configuration.
        data: what the data folders must hold; None: a script of the user's own may read anything.

    Returns:
        What a run would leave out of its data, a text for each folder.
    """
    problems, notes = _model(config), list[str]()
    if config.train.device == "cuda" and not list(Path("/dev").glob("nvidia[0-9]*")):
        problems.append('train.device = "cuda", but this machine has no NVIDIA device; use "auto" or "cpu"')
    if data == "pairs":
        problems += _pairs("train.train_policy.dataset", config.train.train_policy.dataset.local_dir, notes)
        if config.validation.enable:
            problems += _held_out(config, notes)
    if data == "prompts":
        problems += _prompts(config, "train.train_policy.dataset", "train")
        if config.validation.enable:
            problems += _prompts(config, "validation.dataset", "test")
    problems += _rl(config, notes)
    if config.policy.lora is not None and config.policy.lora.lora_path:
        problems += _missing("policy.lora.lora_path", config.policy.lora.lora_path)
    problems += _trackers(config)
    problems += find_missing_access(config)
    if problems:
        raise UserError("\n".join(problems))
    return notes


def with_absolute_paths(config: Config) -> Config:
    """The configuration with local paths made absolute: what is written beside a run must lead there from anywhere."""

    def absolute(value: str) -> str:
        path = Path(value).expanduser()
        return str(path.absolute()) if value and path.exists() else value

    policy, train, validation = config.policy, config.train, config.validation
    lora = policy.lora
    if lora is not None and lora.lora_path:
        lora = lora.model_copy(update={"lora_path": absolute(lora.lora_path)})
    name = absolute(policy.model_name_or_path)
    policy = policy.model_copy(update={"model_name_or_path": name, "lora": lora})
    job = train.train_policy
    data = job.dataset.model_copy(update={"local_dir": absolute(job.dataset.local_dir)})
    # resolved now: the links of the output folder will lead to the new run once it begins
    resume = str(find_checkpoint(Path(train.resume))) if isinstance(train.resume, str) else train.resume
    output = str(Path(train.output_dir).expanduser().absolute())
    job = job.model_copy(update={"dataset": data})
    if isinstance(job, GrpoPolicyConfig):
        tables = {name: getattr(job, name) for name in ("data_term", "reward_hacking_guard")}
        folders = {name: t.model_copy(update={"local_dir": absolute(t.local_dir)}) for name, t in tables.items()}
        job = job.model_copy(update={**folders, "local_reward": _with_absolute_files(job.local_reward)})
    train = train.model_copy(update={"output_dir": output, "resume": resume, "train_policy": job})
    held_out = validation.dataset.model_copy(update={"local_dir": absolute(validation.dataset.local_dir)})
    local = validation.local_reward and _with_absolute_files(validation.local_reward)
    validation = validation.model_copy(update={"dataset": held_out, "local_reward": local})
    return config.model_copy(update={"policy": policy, "train": train, "validation": validation})


def _with_absolute_files(table: LocalRewardConfig) -> LocalRewardConfig:
    """``my_reward.py:red`` leads to the same function from any folder."""

    def absolute(function: LocalRewardFnConfig) -> LocalRewardFnConfig:
        file, _, name = function.function.rpartition(":")
        if not file.endswith(".py"):
            return function
        return function.model_copy(update={"function": f"{Path(file).expanduser().absolute()}:{name}"})

    return table.model_copy(update={"reward_fns": tuple(map(absolute, table.reward_fns))})


def _trackers(config: Config) -> list[str]:
    try:
        require_installed(config.logging.logger)
    except UserError as error:
        return [str(error)]
    return []


def _rl(config: Config, notes: list[str]) -> list[str]:
    """Files of rewards, and folders of pairs that reinforcement learning reads beside its prompts."""
    job = config.train.train_policy
    if not isinstance(job, GrpoPolicyConfig):
        return []
    validation = config.validation.local_reward
    tables = {"train.train_policy.local_reward": job.local_reward, "validation.local_reward": validation}
    missing = [
        problem
        for key, table in tables.items()
        for entry in (table.reward_fns if table else ())
        for problem in _reward_file(f"{key}.reward_fns", entry.function)
    ]
    problems = list[str]()
    if job.data_term.beta > 0:
        problems += _pairs("train.train_policy.data_term", job.data_term.local_dir, notes)
    problems += missing
    if job.reward_hacking_guard.enable:
        problems += _pairs("train.train_policy.reward_hacking_guard", job.reward_hacking_guard.local_dir, notes)
    return problems


def _reward_file(key: str, place: str) -> list[str]:
    """Whether `path/file.py:function` leads to something; the file is read, not run."""
    file, _, name = place.rpartition(":")
    if not file.endswith(".py"):
        return []
    path = Path(file).expanduser()
    if not path.is_file():
        return [f'{key}: "{place}": {path.absolute()} does not exist']
    try:
        found = list(_names(ast.parse(path.read_bytes())))
    except SyntaxError as error:
        return [f'{key}: "{place}": {path}, line {error.lineno}: {error.msg}']
    if name in found or "*" in found:
        return []
    near = difflib.get_close_matches(name, found, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return [f'{key}: "{place}": {path} has no function "{name}"{hint}']


def _names(module: ast.Module) -> Iterator[str]:
    """What the top level of a file, however deep in its branches, may define."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _prompts(config: Config, table: str, split: str) -> list[str]:
    """A set that has not been fetched yet is no problem: the run fetches it."""
    dataset = config.validation.dataset if split == "test" else config.train.train_policy.dataset
    try:
        found = prompt_file(dataset, table, split=split)
        records = read_prompts(found) if found is not None else []
        if split == "test":
            check_sampling(records, config.policy.diffusers.sample.guidance_scale)
    except UserError as error:
        return [str(error)]
    return []


def _missing(key: str, value: str) -> list[str]:
    path = Path(value).expanduser()
    return [] if path.exists() else [f'{key} = "{value}": {path.absolute()} does not exist']


def _model(config: Config) -> list[str]:
    name = config.policy.model_name_or_path
    path = Path(name).expanduser()
    one_file = find_single_file_problem(name)
    if one_file is not None:
        return [one_file]
    if path.is_dir():
        if (path / "model_index.json").is_file():
            return []
        hint = ""
        if "checkpoints" in path.absolute().parts:
            hint = "; this looks like trainer state, exported pipelines are under safetensors/step_<N>"
        elif (path.absolute().parent / "model_index.json").is_file():
            hint = f"; it is a part of a pipeline, which is {path.parent}"
        return [f'policy.model_name_or_path = "{name}": the folder has no model_index.json{hint}']
    is_hub_name = name.count("/") <= 1 and not name.startswith((".", "/", "~"))
    if not is_hub_name:
        return _missing("policy.model_name_or_path", name)
    return _hub(name, config.policy.model_revision)


def _hub(name: str, revision: str | None) -> list[str]:
    """A hub name that is neither in the local cache nor reachable now: the libraries would retry for half a minute."""
    import httpx  # late: only a hub name needs it
    from huggingface_hub import hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "model_index.json", revision=revision), str):
        return []
    why = "HF_HUB_OFFLINE is set"
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("", "0", "false", "no"):
        try:
            url = hf_hub_url(name, "model_index.json", revision=revision)
            httpx.head(url, follow_redirects=True, timeout=_HUB_TIMEOUT_S)
            return []  # there is an answer; what it means the libraries say best
        except (httpx.HTTPError, ValueError) as error:
            why = f"the hub does not answer ({type(error).__name__})"
    near = difflib.get_close_matches(name, [path.parent.name for path in Path().glob("*/model_index.json")], n=1)
    hint = f"; did you mean ./{near[0]}?" if near else ""
    return [
        f'policy.model_name_or_path = "{name}": there is no such folder, the local cache of the hub does not have it, '
        f"and {why}{hint}"
    ]


def _held_out(config: Config, notes: list[str]) -> list[str]:
    """Pairs, or a file of prompts."""
    key, source = "validation.dataset.local_dir", config.validation.dataset.local_dir
    if not source or not is_prompt_file(source):
        return _pairs("validation.dataset", source, notes)
    if not Path(source).expanduser().exists():
        return _missing(key, source)
    try:
        records = read_prompts(source)
        check_sampling(records, config.policy.diffusers.sample.guidance_scale)
    except UserError as error:
        return [f"{key}: {error}"]
    unused = find_unused_keys(records)
    if unused:
        notes.append(f"{key}: keys of rows that have no effect: {', '.join(unused)}")
    return []


def _pairs(table: str, folder: str, notes: list[str]) -> list[str]:
    if not folder:
        return []  # a script may bring its own data
    key = f"{table}.local_dir"
    path = Path(folder).expanduser()
    if not path.exists():
        return _missing(key, folder)
    if not path.is_dir():
        return [f'{key} = "{folder}": is a file; give the folder of the images']
    if next(path.glob("*.json"), None) is None:
        kinds = sorted({entry.suffix or f"{entry.name}/" for entry in path.iterdir()})
        return [
            f'{key} = "{folder}": no captions there; expected pairs <name>.json ({{"prompt": "..."}}) and <name>.jpg, '
            f".jpeg, .png or .webp, found {', '.join(kinds) or 'nothing'}"
        ]
    try:
        left_out = load_pairs(path)[2]
    except UserError as error:
        return [f"{key}: {error}"]
    if left_out:
        notes.append(f"{key}: {left_out}")
    return []
