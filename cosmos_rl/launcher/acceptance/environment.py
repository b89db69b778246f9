"""What a configuration needs outside of itself, looked at before a run folder is made and before torch is loaded."""

import ast
import difflib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cosmos_rl.data.pair_files import load_pairs
from cosmos_rl.data.preference_files import is_preference_table, load_preferences
from cosmos_rl.data.prompt_sets import PromptSource, list_sources, name_set, prompt_file
from cosmos_rl.data.prompt_sizes import SIZED_SETS, list_sizes
from cosmos_rl.data.prompts import check_sampling, find_unused_keys, is_prompt_file, locate_metadata, read_prompts
from cosmos_rl.data.shards import INFO, find_info_problem, is_shard_file
from cosmos_rl.errors import UserError, explain_decoding
from cosmos_rl.launcher.acceptance.optimizer import missing_optimizer
from cosmos_rl.launcher.file_kinds import FileKind, find_kind
from cosmos_rl.policy.config import Config, DatasetConfig, PromptSetConfig
from cosmos_rl.policy.config.buckets import Sides
from cosmos_rl.policy.config.jobs import DataForm, job_kind, online_table
from cosmos_rl.policy.config.plan import name_teachers
from cosmos_rl.policy.config.validation_sets import ValidationSet, asks_service, list_validation_sets
from cosmos_rl.policy.model.single_file import find_single_file_problem
from cosmos_rl.reward.access import find_missing_access
from cosmos_rl.reward.metadata import require_sendable
from cosmos_rl.storage.cache_folder import place_tensors
from cosmos_rl.storage.disk import find_closed_folder, require_writable
from cosmos_rl.text_files import decode_text
from cosmos_rl.tracking.loggers import require_installed

_HUB_TIMEOUT_S = 5.0


def inspect_environment(config: Config, data: DataForm | None) -> tuple[list[str], list[str]]:
    """What the configuration needs outside of itself.

    Args:
        config: a valid configuration.
        data: what the data folders must hold; None: a script of the user's own may read anything.

    Returns:
        Folders and files that are named and are not there, or hold no usable data, one problem each; and what a run
        would leave out of its data, a text for each folder.
    """
    problems, notes = _model(config), list[str]()
    if config.train.device == "cuda" and not list(Path("/dev").glob("nvidia[0-9]*")):
        problems.append('train.device = "cuda", but this machine has no NVIDIA device; use "auto" or "cpu"')
    if data is not None:
        problems += _DATA[data](config, notes)
    if job_kind(config).online:
        problems += _rewards(config) + _check_pair_folders(config, notes)
        for key, place in name_teachers(online_table(config)).items():
            problems += _policy_place(key, place, adapter=config.policy.lora is not None)
    if config.policy.lora is not None and config.policy.lora.lora_path:
        problems += _policy_place("policy.lora.lora_path", config.policy.lora.lora_path, adapter=True)
    problems += _cache(config) + _trackers(config) + missing_optimizer(config) + _missing_quantiser(config)
    problems += find_missing_access(config)
    return problems, notes


def _cache(config: Config) -> list[str]:
    """A named folder of cached latents and texts in which nothing can be written."""
    job = config.train.train_policy
    place = place_tensors(job.cache.dir, config.train.output_dir)
    if place.key == "train.output_dir" or not (job.cached_text or job.cached_latents):
        return []  # train.output_dir is looked at by itself
    try:
        require_writable(place.folder / "entry", place.advice)
    except UserError as error:
        return [f'{place.key} = "{place.value}": {error}']
    return []


def _policy_place(key: str, value: str, *, adapter: bool) -> list[str]:
    """Whether weights of a policy are of the wrong kind: no adapter where one is trained, else no pipeline."""
    path = Path(value).expanduser()
    if missing := _missing(key, value):
        return missing
    kind, wanted = find_kind(path), "give a pipeline folder without [policy.lora]"
    fits, right = (path / "transformer").is_dir(), {FileKind.PIPELINE}
    if adapter:
        wanted = "give an exported adapter with [policy.lora], such as safetensors/step_<N>/lora of a run"
        fits, right = any(path.rglob("*.safetensors")), {FileKind.ADAPTER, FileKind.ADAPTER_FILE}
    if kind in right or (kind is None and fits):
        return []
    found = "has no weights of a policy"
    if kind is not None:
        found = f"is {kind.value[0]}"
    elif path.is_file():
        found = "is no complete .safetensors file"
    if kind is FileKind.CHECKPOINT:
        wanted += f" (cosmos-rl export {value} --out DIR makes it)"
    return [f'{key} = "{value}": {found}; {wanted}']


def _missing_quantiser(config: Config) -> list[str]:
    """The package that stores the base in 8 or 4 bits, where it is not installed; it is only looked for."""
    lora = config.policy.lora
    if lora is None or lora.quantize_base == "none" or importlib.util.find_spec("torchao") is not None:
        return []
    return [f'policy.lora.quantize_base = "{lora.quantize_base}" needs torchao 0.18 or newer: pip install -U torchao']


def _trackers(config: Config) -> list[str]:
    try:
        require_installed(config.logging.logger)
    except UserError as error:
        return [str(error)]
    return []


def _check_pair_folders(config: Config, notes: list[str]) -> list[str]:
    """Folders of pairs that reinforcement learning reads in addition to its prompts."""
    job, problems = online_table(config), list[str]()
    if job.data_term.beta > 0:
        problems += _pairs(config, "train.train_policy.data_term", job.data_term.local_dir, notes)
    if job.reward_hacking_guard.enable:
        problems += _pairs(config, "train.train_policy.reward_hacking_guard", job.reward_hacking_guard.local_dir, notes)
    return problems


def _rewards(config: Config) -> list[str]:
    """Files and packages of reward functions, and of the one that gives features."""
    tables = {
        "train.train_policy.local_reward": online_table(config).local_reward,
        "validation.local_reward": config.validation.local_reward,
    }
    tables |= {f"validation.sets.{i}.local_reward": one.local_reward for i, one in enumerate(config.validation.sets)}
    places = [(f"{key}.reward_fns", entry.function) for key, one in tables.items() if one for entry in one.reward_fns]
    features = online_table(config).diversity_features
    if features is not None:
        places.append(("train.train_policy.diversity_features", features))
    return [problem for key, place in places for problem in _reward_file(key, place)]


def _reward_file(key: str, place: str) -> list[str]:
    """Whether `path/file.py:function` leads to something, or there is the package; the file is read, not run."""
    file, _, name = place.rpartition(":")
    if not file.endswith(".py"):
        package = file.partition(".")[0]  # to find what is in it, it would have to be imported
        if package == "__main__":  # the user's own script, which is not run yet
            return []
        if package and (importlib.util.find_spec(package) or Path(package).exists() or Path(f"{package}.py").exists()):
            return []
        where = f"in {os.getcwd()} or among the installed packages"
        return [f'{key}: "{place}": there is no module {package or file} {where}']
    path = Path(file).expanduser()
    if not path.is_file():
        return [f'{key}: "{place}": {path.absolute()} does not exist']
    try:
        content = path.read_bytes()
        if b"\0" in content:
            decode_text(content)
        found = list(_names(ast.parse(content)))
    except UnicodeDecodeError as error:
        return [f'{key}: "{place}": {path} {explain_decoding(error)}']
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


def _prompt_data(config: Config, notes: list[str]) -> list[str]:
    """Prompts for training and validation; of those nothing is left out."""
    return _check_prompts(config, lambda _: True)


def find_wrong_names(config: Config, data: DataForm | None) -> list[str]:
    """Of the prompt sets that are named those that there are not; looks for no file but kept ones of such a set."""
    if data != "prompts":
        return []
    return _check_prompts(config, lambda source: bool(source.name) and not source.local_dir)


def _check_prompts(config: Config, counts: Callable[[PromptSource], bool]) -> list[str]:
    sizes = config.policy.diffusers.training_sizes if config.policy.diffusers.buckets is not None else ()
    sources = list_sources(config.train.train_policy.dataset, "train.train_policy.dataset")
    problems = list[str]()
    for source, key in sources:
        if counts(source):
            names = source.rewards or () if isinstance(source, PromptSetConfig) else ()
            sent = asks_service(config, validation=False, names=names)
            problems += _prompts(source, key, "train", sizes=sizes, sent=sent)
    for one in list_validation_sets(config):
        guidance, dataset = one.config.policy.diffusers.sample.guidance_scale, one.config.validation.dataset
        if counts(dataset):
            sent = asks_service(one.config, validation=True, names=one.rewards)
            problems += _prompts(dataset, f"{one.key}.dataset", "test", guidance, sent=sent)
    return problems


def _prompts(
    dataset: PromptSource,
    table: str,
    split: str,
    guidance: float | None = None,
    sizes: Sequence[Sides] = (),
    *,
    sent: bool,
) -> list[str]:
    """A set that has not been fetched yet is no problem: the run fetches it.

    `guidance`: used for sampling. `sizes`: those that rows may name; empty: nobody reads what they name. `sent`:
    whether the reward service gets what rows have besides the prompt.
    """
    try:
        file = prompt_file(dataset, table, split=split)
        if file is not None:
            records = read_prompts(file)
            if guidance is not None:
                check_sampling(records, guidance)
            if sent:
                require_sendable(locate_metadata(records))
            if sizes and any(list_sizes(records, sizes)) and isinstance(dataset, PromptSetConfig):
                return [f"{table}: {SIZED_SETS}"]
    except UserError as error:
        return [name_set(error, table) if isinstance(dataset, PromptSetConfig) else str(error)]
    return []


def _pair_data(config: Config, notes: list[str]) -> list[str]:
    """Captioned images for training and validation."""
    table, dataset, problems = "train.train_policy.dataset", config.train.train_policy.dataset, list[str]()
    for number, folder in enumerate(dataset.listed):
        place = f"{table}.folders.{number}" if dataset.folders else table
        problems += _pairs(config, place, folder.local_dir, notes)
    for one in list_validation_sets(config):
        problems += _held_out(one, notes)
    return problems


def _preference_data(config: Config, notes: list[str]) -> list[str]:
    """Chosen and rejected images for training and validation."""
    problems = _preferences(config, "train.train_policy.dataset", config.train.train_policy.dataset, notes)
    for one in list_validation_sets(config):
        held_out = one.config.validation.dataset
        if is_prompt_file(held_out.local_dir) and not is_preference_table(held_out.local_dir):
            problems += _held_out(one, notes)
        else:
            problems += _preferences(config, f"{one.key}.dataset", held_out, notes)
    return problems


def _preferences(config: Config, key: str, dataset: DatasetConfig, notes: list[str]) -> list[str]:
    if not dataset.local_dir:
        return []  # a script may bring its own data
    if missing := _missing(f"{key}.local_dir", dataset.local_dir):
        return missing
    try:
        video = config.policy.diffusers.is_video
        left_out = load_preferences(dataset.local_dir, dataset.rejected_dir, video=video).left_out
    except UserError as error:
        return [f"{key}: {error}"]
    if left_out:
        notes.append(f"{key}: {left_out}")
    return []


def _missing(key: str, value: str) -> list[str]:
    """The problem of a path that is not there, or lies where this user may not look; none: it is there."""
    path = Path(value).expanduser()
    closed = find_closed_folder(path)
    if closed is not None:
        return [f'{key} = "{value}": {closed} cannot be entered (Permission denied); look at its permissions']
    return [] if path.exists() else [f'{key} = "{value}": {path.absolute()} does not exist']


def _model(config: Config) -> list[str]:
    name = config.policy.model_name_or_path
    path = Path(name).expanduser()
    if find_closed_folder(path) is not None:
        return _missing("policy.model_name_or_path", name)
    if path.is_file():
        problem = find_single_file_problem(config.policy)
        return [] if problem is None else [problem]
    if path.is_dir():
        if (path / "model_index.json").is_file():
            return []
        hint = ""
        if "checkpoints" in path.absolute().parts:
            hint = "; this looks like trainer state, exported pipelines are under safetensors/step_<N>"
        elif (path.absolute().parent / "model_index.json").is_file():
            hint = f"; it is a part of a pipeline, which is {path.parent}"
        elif find_kind(path) is FileKind.ADAPTER:
            hint = "; it is an exported adapter: name its base here, and the adapter as policy.lora.lora_path"
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


def _held_out(one: ValidationSet, notes: list[str]) -> list[str]:
    """Pairs, or a file of prompts."""
    config = one.config
    key, source = f"{one.key}.dataset.local_dir", config.validation.dataset.local_dir
    if not source or not is_prompt_file(source):
        return _pairs(config, f"{one.key}.dataset", source, notes)
    if missing := _missing(key, source):
        return missing
    try:
        records = read_prompts(source)
        check_sampling(records, config.policy.diffusers.sample.guidance_scale)
    except UserError as error:
        return [f"{key}: {error}"]
    unused = find_unused_keys(records)
    if unused:
        notes.append(f"{key}: keys of rows that have no effect: {', '.join(unused)}")
    return []


def _pairs(config: Config, table: str, folder: str, notes: list[str]) -> list[str]:
    if not folder:
        return []  # a script may bring its own data
    key = f"{table}.local_dir"
    path = Path(folder).expanduser()
    if missing := _missing(key, folder):
        return missing
    if not path.is_dir() and not is_shard_file(path):
        why = find_info_problem(path) or "is a file"
        return [f'{key} = "{folder}": {why}; give the folder of the images, a .tar, or {INFO}']
    try:
        left_out = load_pairs(path, video=config.policy.diffusers.is_video)[2]
    except UserError as error:
        return [f"{key}: {error}"]
    if left_out:
        notes.append(f"{key}: {left_out}")
    return []


_DATA: dict[DataForm, Callable[[Config, list[str]], list[str]]] = {
    "pairs": _pair_data,
    "preferences": _preference_data,
    "prompts": _prompt_data,
}
"""What looks at the data folders of a job; puts what would be left out into the list."""
