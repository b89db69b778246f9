"""Files of adapters, of this program and of others: which layers they are for, and how strongly they act.

Recognised by the names of their tensors: PEFT, diffusers (also its older names), kohya, OneTrainer.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cosmos_rl.errors import UserError
from cosmos_rl.policy.model.original_names import Names, Pair, Rows, adapters_from_original, original_names

_ENDINGS = (
    (r"\.lora_A(\.\w+)?\.weight", "down", "PEFT"),
    (r"\.lora_B(\.\w+)?\.weight", "up", "PEFT"),
    (r"\.lora_down\.weight", "down", "kohya"),
    (r"\.lora_up\.weight", "up", "kohya"),
    (r"\.lora_linear_layer\.down\.weight|(_lora[12]?|\.lora)\.down\.weight", "down", "older diffusers"),
    (r"\.lora_linear_layer\.up\.weight|(_lora[12]?|\.lora)\.up\.weight", "up", "older diffusers"),
    (r"\.alpha", "alpha", ""),
)
_PREFIXES = re.compile(
    r"(base_model\.model\.|model\.diffusion_model\.|diffusion_model\.|transformer\.|unet\.|lora_unet_|lora_transformer_"
    r"|lycoris_)+"
)
_TEXT = re.compile(r"(base_model\.model\.)?(text_encoder|te\d?\.|lora_te|lora_text|text_encoders)")

PATH_KEY = "policy.lora.lora_path"
_PEFT_FILE = "adapter_model.safetensors"
_WORD = r"(?:(?<![A-Za-z])(?:high|low|HIGH|LOW)|High|Low)"
_EXPERT_WORDS = (_WORD + r"(?=[-_. ]?[Nn](?:oise|OISE))", _WORD + r"(?![A-Za-z])")
"""The word that names an expert of Wan 2.2 in the name of a file, as in `HighNoise`; else one that stands alone. Not
that of `highlight` or `highres`."""

Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
"""A library's way from the names of a file to those of PEFT, factors of tensors of alpha in the matrices."""


@dataclass(frozen=True)
class FileAdapter:
    """What a file holds for a transformer."""

    form: str
    """Whose names it has."""
    pairs: Mapping[str, Pair]
    """By diffusers' names of the layers."""
    factors: Mapping[str, float]
    """Layer -> alpha over rank that is left to apply; empty where the tensors do not settle it (PEFT without tensors of
    alpha)."""
    unknown: Sequence[str]
    """Names of tensors that belong to no layer, or are of another kind of adapter."""
    of_text: Sequence[str]
    """Names of tensors that are for the text encoders."""


def adapter_file(path: str, key: str = PATH_KEY) -> Path:
    """The safetensors file of an exported adapter: the file itself, or the one in a folder.

    Raises:
        UserError: nothing there.
    """
    location = Path(path).expanduser()
    tries = [location]
    if location.suffix != ".safetensors":
        names = ("model.safetensors", "pytorch_lora_weights.safetensors", _PEFT_FILE)
        tries = [location / place / name for place in ("", "lora") for name in names]
        alone = list(location.glob("*.safetensors"))
        tries += alone if len(alone) == 1 else []
    for candidate in tries:
        if candidate.is_file():
            return candidate
    raise UserError(f"{key} = {path!r}: no adapter there; looked for {', '.join(map(str, tries))}")


def adapter_place(exported: str, denoiser: str, trained: Collection[str]) -> str:
    """Where an exported adapter, by file or folder, has the one of a denoiser.

    Of several experts a file has the one that its name says, ``high_noise`` or ``low_noise``, and the other one's is
    next to it; a name that says none is each one's. The only trained expert takes any file, and the folder of PEFT, of
    which several have one each.

    Args:
        exported: ``policy.lora.lora_path``.
        denoiser: ``transformer`` or ``transformer_2``.
        trained: all trained ones.
    """
    path = Path(exported)
    if path.suffix != ".safetensors":
        of_peft = len(trained) == 1 and (path.expanduser() / _PEFT_FILE).is_file()
        own = (path.expanduser() / denoiser / _PEFT_FILE).is_file()  # of several experts each has a folder there
        return exported if not own and (denoiser == "transformer" or of_peft) else str(path / denoiser)
    found = [match for word in _EXPERT_WORDS for match in list(re.finditer(word, path.name))[-1:]]
    if len(trained) == 1 or not found:
        return exported
    match, wanted = found[0], "high" if denoiser == "transformer" else "low"
    if match[0].isupper():
        wanted = wanted.upper()
    elif match[0].istitle():
        wanted = wanted.title()
    return str(path.with_name(path.name[: match.start()] + wanted + path.name[match.end() :]))


def read_tensors(tensors: Mapping[str, Tensor], class_name: str, rows: Rows, convert: Convert | None) -> FileAdapter:
    """The adapter in the tensors of a file.

    Args:
        tensors: of the whole file.
        class_name: of the transformer.
        rows: of all its layers.
        convert: tried where some names are not known here; None: nothing is.
    """
    found = _read(tensors, original_names(class_name), rows)
    other_kinds = any(_parse(key)[1] is None for key in found.unknown)  # converters leave some of them out in silence
    if not found.unknown or other_kinds or convert is None:
        return found
    try:
        converted = convert({name: value for name, value in tensors.items() if name not in found.of_text})
    except (ValueError, KeyError, IndexError, RuntimeError, AttributeError, TypeError):  # not a form that it knows
        return found
    again = _read(converted, None, rows)
    if again.unknown or not again.pairs:
        return found
    factors = again.factors
    if not factors and _has_factors(tensors, found.form):
        factors = dict.fromkeys(again.pairs, 1.0)  # the converter has applied them
    return FileAdapter("diffusers' converters", again.pairs, factors, [], found.of_text)


def _has_factors(tensors: Mapping[str, Tensor], form: str) -> bool:
    """Whether the tensors of a file settle how strongly it acts; those of PEFT do with alpha alone."""
    return form != "PEFT" or any(_parse(key)[1] == "alpha" for key in tensors)


def _read(tensors: Mapping[str, Tensor], names: Names | None, rows: Rows) -> FileAdapter:
    parts: dict[str, dict[str, Tensor]] = {}
    keys: dict[str, list[str]] = {}
    forms, unknown, of_text = set[str](), list[str](), list[str]()
    for key, value in tensors.items():
        module, role, form = _parse(key)
        if _TEXT.match(key):
            of_text.append(key)
        elif role is None:
            unknown.append(key)
        else:
            forms.add("OneTrainer" if key.startswith("lora_transformer_") else form)
            parts.setdefault(module, {})[role] = value
            keys.setdefault(module, []).append(key)
    whole = {module: roles for module, roles in parts.items() if _is_whole(roles)}
    unknown += [key for module in parts.keys() - whole.keys() for key in keys[module]]
    placed, strangers = _place(whole, names, rows)
    unknown += [key for module in strangers for key in keys[module]]
    factors: dict[str, float] = {}
    if forms - {"", "PEFT"} or any("alpha" in roles for roles in whole.values()):
        factors = {layer: _factor(whole[module]) for layer, (module, _) in placed.items()}
    form = " and ".join(sorted(forms - {""}))
    return FileAdapter(form, {layer: pair for layer, (_, pair) in placed.items()}, factors, sorted(unknown), of_text)


def _is_whole(roles: Mapping[str, Tensor]) -> bool:
    """Whether there are both matrices of a layer, and as its alpha, if any, one number."""
    matrices = all(role in roles and roles[role].ndim >= 2 for role in ("down", "up"))
    return matrices and ("alpha" not in roles or roles["alpha"].numel() == 1)


def _parse(key: str) -> tuple[str, str | None, str]:
    for ending, role, form in _ENDINGS:
        match = re.search(rf"({ending})$", key)
        if match:
            module = key[: match.start()].replace(".processor.", ".")
            return module[_prefix_length(module) :].replace(".", "_"), role, form
    return key, None, ""


def _prefix_length(module: str) -> int:
    match = _PREFIXES.match(module)
    return match.end() if match else 0


def _factor(roles: Mapping[str, Tensor]) -> float:
    """Alpha over rank; 1 where a file of this form has no alpha, as its readers take it."""
    if "alpha" not in roles:
        return 1.0
    return float(roles["alpha"]) / roles["down"].shape[0]


def _place(
    whole: Mapping[str, Mapping[str, Tensor]], names: Names | None, rows: Rows
) -> tuple[dict[str, tuple[str, Pair]], list[str]]:
    """Layer -> (module in the file, its matrices), and the modules that are no layer here."""
    own = {name.replace(".", "_"): name for name in rows}
    own |= {name.removesuffix(".0").replace(".", "_"): name for name in rows if name.endswith(".to_out.0")}
    placed: dict[str, tuple[str, Pair]] = {}
    others: dict[str, Pair] = {}
    for module, roles in whole.items():
        pair = (roles["down"], roles["up"])
        if module in own:
            placed[own[module]] = (module, pair)
        else:
            others[module] = pair
    if names is None:
        return placed, sorted(others)
    found, strangers = adapters_from_original(names, others, rows)
    return placed | found, strangers


def fit_pairs(found: FileAdapter, ranks: Mapping[str, int]) -> dict[str, Pair]:
    """The matrices of a file for a transformer whose adapters have these ``ranks``, without what is zero.

    A joined layer of a file, such as qkv, has zeros for the parts that were not adapted.
    """
    pairs = {layer: pair for layer, pair in found.pairs.items() if layer in ranks or pair[1].any()}
    return {layer: _with_rank(pair, ranks.get(layer, pair[0].shape[0])) for layer, pair in pairs.items()}


def describe_empty(found: FileAdapter) -> str:
    """What is wrong with a file without an adapter for any layer of the transformer."""
    only = f"; all it has is for the text encoders ({found.of_text[0]}, …)" if found.of_text else ""
    return f"adapts no layer of the transformer{only}; give the file or folder of an adapter that does"


def _with_rank(pair: Pair, rank: int) -> Pair:
    """The same product with fewer columns, where the others are zero: what is left of a joined adapter's part."""
    down, up = pair
    if down.shape[0] <= rank:
        return pair
    used = up.flatten(1).reshape(up.shape[0], down.shape[0], -1).abs().amax((0, 2)) > 0
    if int(used.sum()) > rank:
        return pair
    order = torch.argsort((~used).long(), stable=True)[:rank].sort().values
    return down[order], up[:, order]
