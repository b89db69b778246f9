"""Subcommands of `cosmos-rl`: each takes the rest of the command line and returns the exit code."""

import argparse
import inspect
import shlex
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from cosmos_rl.checkpoint.layout import LORA_FILE, find_checkpoint
from cosmos_rl.data.pair_files import METAS, list_media
from cosmos_rl.data.text_lengths import describe_truncation
from cosmos_rl.errors import UserError
from cosmos_rl.launcher.file_kinds import FileKind, find_kind
from cosmos_rl.launcher.flags import FlagParser, add_lenient
from cosmos_rl.launcher.sample_media import check_class, check_file, load_media
from cosmos_rl.policy.config.model_rules import BINNING, INSTRUCTION
from cosmos_rl.storage import atomic
from cosmos_rl.storage.disk import report_full_disk, require_writable
from cosmos_rl.storage.run_folder import find_run
from cosmos_rl.storage.weight_files import read_table
from cosmos_rl.tracking.report import write_report

_OTHER_PLACE = "choose another place with --out"


def tiny_model(argv: Sequence[str]) -> int:
    """Write a tiny model folder of a family, made of the real classes, without a network."""
    from cosmos_rl.policy.model.tiny import FAMILIES, build

    presets = [f"  {family} {preset}: {text}" for family, texts in FAMILIES.items() for preset, text in texts.items()]
    parser = FlagParser(
        prog="cosmos-rl tiny-model",
        description=tiny_model.__doc__,
        epilog="\n".join(["presets:", *presets]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("family", choices=list(FAMILIES))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new or an empty folder")
    parser.add_argument("--preset", help="default: the first of the family")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same files (0)")
    given = parser.parse_args(argv)
    require_writable(given.out, _OTHER_PLACE)
    with report_full_disk(given.out, remedy=""):
        print(build(given.family, given.out, given.preset or next(iter(FAMILIES[given.family])), given.seed))
    return 0


def create_prompts(argv: Sequence[str]) -> int:
    """Write the same caption to `metas/<name>.txt` for every `videos/<name>.mp4`; captions that exist are kept."""
    parser = FlagParser(prog="cosmos-rl create-prompts", description=create_prompts.__doc__)
    parser.add_argument("--dataset_path", "--dataset-path", type=Path, required=True, metavar="DIR")
    parser.add_argument("--prompt", required=True, help="the caption")
    parser.add_argument("--is_image", "--is-image", action="store_true", help="for images/* instead")
    given = parser.parse_args(argv)
    prompt = " ".join(given.prompt.split())
    if not prompt:
        raise UserError("--prompt: is empty; a caption says what the videos show")
    folder = given.dataset_path.expanduser()
    files = list_media(folder, video=not given.is_image)
    captions = [folder / METAS / f"{file.stem}.txt" for file in files]
    missing = [caption for caption in captions if not caption.exists()]
    if missing:
        require_writable(missing[0], "captions lie in the folder of the data set: copy it")
        (folder / METAS).mkdir(exist_ok=True)
    for caption in missing:
        atomic.write_text(caption, prompt + "\n")
    print(f"{folder / METAS}: {len(missing)} captions written, {len(captions) - len(missing)} kept")
    return 0


class _Format(NamedTuple):
    """A form of `cosmos-rl export`."""

    text: str
    suffix: str = ""
    """Of its one file; empty: it is a folder."""


_FORMATS = {
    "diffusers": _Format("an adapter, or without [policy.lora] a pipeline folder"),
    "comfyui": _Format("an adapter by the names of ComfyUI and kohya, with alpha", ".safetensors"),
    "peft": _Format("an adapter for PEFT"),
    "merged": _Format("a pipeline folder, the adapter merged"),
    "single-file": _Format("the transformer under its original names, an adapter merged", ".safetensors"),
    "cosmos-pt": _Format("a file like Cosmos-Predict2.5's own, an adapter merged", ".pt"),
}


def _describe_formats() -> str:
    return "; ".join(f"{name}: {form.text}" for name, form in _FORMATS.items()) + " (diffusers)"


def export(argv: Sequence[str]) -> int:
    """Turn a checkpoint into what other tools load: an adapter, a whole pipeline, or one file."""
    parser = FlagParser(prog="cosmos-rl export", description=export.__doc__)
    parser.add_argument("checkpoint", type=Path, help="a run folder (its newest step), …/step_<N> or …/step_<N>/policy")
    parser.add_argument("--out", type=Path, required=True, metavar="PATH", help="a new folder or file")
    parser.add_argument("--format", choices=list(_FORMATS), default="diffusers", help=_describe_formats())
    given = parser.parse_args(argv)
    suffix = _FORMATS[given.format].suffix
    if suffix and given.out.suffix != suffix:
        raise UserError(f"--out {given.out}: --format {given.format} writes one file, name it <name>{suffix}")
    kind = find_kind(given.checkpoint)
    if kind not in (None, FileKind.CHECKPOINT, FileKind.RUN):
        raise UserError(
            f"{kind.describe(given.checkpoint)}. cosmos-rl export takes a checkpoint of a run, such as "
            "<output_dir>/<timestamp>/checkpoints/step_<N>/policy"
        )
    policy = find_checkpoint(given.checkpoint)
    require_writable(given.out, _OTHER_PLACE)
    from cosmos_rl.policy.trainer.offline import export_checkpoint  # imports torch: seconds

    with report_full_disk(given.out, remedy=""):
        for written in export_checkpoint(policy, given.out, given.format):
            print(written)
    return 0


def import_weights(argv: Sequence[str]) -> int:
    """Make a pipeline folder of a `.pt` checkpoint of Cosmos-Predict2.5, which holds a transformer alone."""
    parser = FlagParser(prog="cosmos-rl import", description=import_weights.__doc__)
    parser.add_argument("file", type=Path, help="the .pt file")
    parser.add_argument("--base", required=True, help="pipeline (folder or hub name) that has the other parts")
    parser.add_argument("--revision", help="of the base on the hub")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    given = parser.parse_args(argv)
    kind = find_kind(given.file)
    if kind not in (None, FileKind.TORCH_FILE):
        raise UserError(f"{kind.describe(given.file)}. cosmos-rl import takes a .pt file")
    if not given.file.expanduser().is_file():
        raise UserError(f"{given.file}: no such file")
    require_writable(given.out, _OTHER_PLACE)
    from cosmos_rl.policy.trainer.offline import import_consolidated  # imports torch: seconds

    with report_full_disk(given.out, remedy=""):
        print(import_consolidated(given.file, given.base, given.revision, given.out))
    return 0


def report(argv: Sequence[str]) -> int:
    """Make `report.html` in a run folder: one page with images, curves and numbers that shows what the run did."""
    parser = FlagParser(prog="cosmos-rl report", description=report.__doc__)
    parser.add_argument("path", type=Path, help="a run folder, or an output folder (its newest run)")
    given = parser.parse_args(argv)
    run = find_run(given.path)
    require_writable(run.root / "report.html", "the report lies in the run folder: copy that, and name the copy")
    with report_full_disk(given.path, remedy=""):
        print(write_report(run.root))
    return 0


def sample(argv: Sequence[str]) -> int:
    """Make images or videos with plain diffusers from a pipeline or from an exported adapter."""
    parser = FlagParser(prog="cosmos-rl sample", description=sample.__doc__)
    parser.add_argument("source", help="pipeline folder or hub name, or an exported adapter (…/step_<N> or …/lora)")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--revision", help="of the pipeline on the hub; default: as in training, else its main one")
    parser.add_argument("--out", type=Path, default=Path("samples"), metavar="DIR", help="a new folder (samples)")
    parser.add_argument("--num", type=_count, default=1, help="images per prompt (1)")
    parser.add_argument("--steps", type=_count, default=28, help="sampling steps (28)")
    parser.add_argument("--guidance", type=float, default=4.5, help="classifier-free guidance (4.5)")
    parser.add_argument("--size", type=_count, nargs=2, metavar=("H", "W"), help="pixels; default: the pipeline's own")
    parser.add_argument("--max-prompt-length", type=_count, help="tokens; default: as in training, else 256")
    both = argparse.BooleanOptionalAction
    parser.add_argument(
        "--prompt-instruction", action=both, help="SANA: the text in front of prompts; default: as in training, else on"
    )
    parser.add_argument(
        "--resolution-binning", action=both, help="SANA, PRX: sizes of a list; default: as in training, else off"
    )
    parser.add_argument("--frames", type=_count, help="of a video; default: the pipeline's own")
    media = parser.add_mutually_exclusive_group()
    media.add_argument("--image", type=Path, help="first frame of all videos, for pipelines that take one")
    media.add_argument("--video", type=Path, help="a video whose last frames all videos continue, likewise")
    parser.add_argument("--seed", type=int, default=0, help="image k of a prompt has the seed SEED + k (0)")
    given = parser.parse_args(argv)
    require_writable(given.out, _OTHER_PLACE)
    if given.out.exists():
        raise UserError(f"{given.out} exists already: name a new folder with --out")
    source = _find_source(given.source, given.revision)
    file = check_file(given.image, given.video)
    import torch  # seconds, so only once the command line is known to be right

    from cosmos_rl.checkpoint.export import read_sampling
    from cosmos_rl.policy.model.driver.rows import find_row
    from cosmos_rl.tracking.media import Shown, save_gallery

    trained = read_sampling(source.adapter or Path(source.base).expanduser())
    length = given.max_prompt_length or trained.get("max_sequence_length", 256)
    check_class(_read_class(source), file)
    pipe = _open(source)
    settings = _call_settings(pipe, given, {**trained, "max_sequence_length": length})
    prompts = [prompt for prompt in given.prompts for _ in range(given.num)]
    generators = [torch.Generator().manual_seed(given.seed + k) for _ in given.prompts for k in range(given.num)]
    if file is not None:
        settings |= load_media(pipe, file, settings)
    media = _draw(pipe, prompts, generators, settings, length)
    fps = find_row(type(pipe).__name__).fps
    shown = [
        Shown(pixels, prompt, generator.initial_seed(), fps=fps)
        for pixels, prompt, generator in zip(media, prompts, generators, strict=True)
    ]
    for path in save_gallery(given.out, shown, remedy=""):
        print(path)
    return 0


def _call_settings(pipe: Any, given: argparse.Namespace, trained: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of the pipeline's call by the names that its class has for them."""
    from cosmos_rl.policy.model.driver.rows import find_row

    accepted, row = inspect.signature(type(pipe).__call__).parameters, find_row(type(pipe).__name__)
    settings: dict[str, Any] = {"num_inference_steps": given.steps, **row.call, **trained}
    _apply_switches(settings, given, type(pipe), accepted)
    if given.size and not settings.get(BINNING):
        step = getattr(pipe, "vae_scale_factor", None) or getattr(pipe, "vae_scale_factor_spatial", 8)
        if any(side % step for side in given.size):
            raise UserError(f"--size {given.size[0]} {given.size[1]}: this pipeline needs multiples of {step}")
    if given.size:
        settings |= {"height": given.size[0], "width": given.size[1], **row.call_at(*given.size)}
    guidance = [name for name in row.guidance_names if name in accepted]
    frames = [name for name in (row.frames, "num_frames", "frames") if name and name in accepted]
    if guidance:
        settings[guidance[0]] = given.guidance
    if guidance[:1] == ["true_cfg_scale"] or row.negative is not None:
        settings["negative_prompt"] = row.negative or ""
    if given.frames and not frames:
        raise UserError(f"--frames {given.frames}: {type(pipe).__name__} makes images")
    if given.frames:
        settings[frames[0]] = given.frames
    return {name: value for name, value in settings.items() if name in accepted}


def _apply_switches(settings: dict[str, Any], given: argparse.Namespace, kind: type, accepted: Container[str]) -> None:
    """Let the flags of the command line replace what the training had.

    Raises:
        UserError: the pipeline has no such argument.
    """
    flags = {INSTRUCTION: given.prompt_instruction, BINNING: given.resolution_binning}
    foreign = [name for name, value in flags.items() if value is not None and name not in accepted]
    if foreign:
        raise UserError(f"{kind.__name__} has no argument {foreign[0]}: leave out its flag")
    if given.prompt_instruction is not None:
        settings.pop(INSTRUCTION, None)
    if given.prompt_instruction is False:
        settings[INSTRUCTION] = None
    if given.resolution_binning is not None:
        settings[BINNING] = given.resolution_binning
    if given.size and settings.get(BINNING) and BINNING in accepted:
        print(f"note: {kind.__name__} samples at the nearest size of its own list and resizes", file=sys.stderr)


def _draw(
    pipe: Any, prompts: Sequence[str], generators: Sequence[Any], settings: dict[str, Any], length: int
) -> Iterator[Any]:
    """Images uint8 ``[H, W, 3]`` or videos ``[T, H, W, 3]``; prompts that are cut are named in one line."""
    from cosmos_rl.data.images import to_uint8
    from cosmos_rl.policy.model.quiet import build_text_encoders, quiet_warnings

    tokenizers = [part for name, part in pipe.components.items() if name.startswith("tokenizer") and part is not None]
    encoders = build_text_encoders(tokenizers, length)
    line = describe_truncation([(repr(text[:40]), text) for text in dict.fromkeys(prompts)], encoders, "prompts")
    if line:
        print(f"warning: {line}", file=sys.stderr)
    for prompt, generator in zip(prompts, generators, strict=True):
        arguments = {"prompt": [prompt], "generator": generator, "output_type": "pt", "return_dict": False}
        try:
            with quiet_warnings():
                made = pipe(**arguments, **settings)
        except ValueError as error:  # what pipelines say about their arguments
            raise UserError(f"{type(pipe).__name__}: {error}") from error
        yield to_uint8(made[0])[0]


def schema(argv: Sequence[str]) -> int:
    """Print all configuration keys: the JSON schema, or the documentation page, or a TOML file of all defaults."""
    parser = FlagParser(prog="cosmos-rl schema", description=schema.__doc__)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="the page docs/configuration.md")
    form.add_argument("--toml", action="store_true", help="all keys with their defaults, to start a file from")
    given = parser.parse_args(argv)
    from cosmos_rl.policy.config.document import json_schema, markdown, toml_template

    make_text = json_schema
    if given.toml:
        make_text = toml_template
    elif given.markdown:
        make_text = markdown
    print(make_text(), end="")
    return 0


def translate(argv: Sequence[str]) -> int:
    """Print the present form of an older configuration; what each key became goes to stderr."""
    parser = FlagParser(prog="cosmos-rl translate", description=translate.__doc__)
    parser.add_argument("file", type=Path, help="the older TOML file")
    parser.add_argument("--out", type=Path, metavar="X.toml", help="write a new file in place of printing")
    add_lenient(parser)
    given = parser.parse_args(argv)
    from cosmos_rl.policy.config import config_from_tables, is_older, read_toml, translate_file

    if not is_older(read_toml(given.file)):
        raise UserError(f"{given.file}: is not of the older form, which has [model] and no [policy]")
    if given.out is not None:
        require_writable(given.out, _OTHER_PLACE)
        if given.out.exists():
            raise UserError(f"{given.out} exists already: name a new file with --out")
    translation = translate_file(given.file, lenient=given.lenient)
    config_from_tables(translation.tables, f"the translation of {given.file}")
    print("\n".join(translation.describe()), file=sys.stderr)
    text = tomli_w.dumps(translation.tables)
    if given.out is None:
        print(text, end="")
    else:
        atomic.write_text(given.out, text)
        print(given.out)
    return 0


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


class _Source(NamedTuple):
    """What samples."""

    base: str
    """Folder or hub name of a pipeline."""
    revision: str | None
    adapter: Path | None
    """Folder of an exported adapter."""


def _find_source(source: str, revision: str | None) -> _Source:
    place = Path(source).expanduser()
    for folder in (place, place / "lora"):
        configs = [*folder.glob("adapter_config.json"), *folder.glob("transformer*/adapter_config.json")]
        for config in configs[:1]:
            about = read_table(config)
            if not (config.parent / LORA_FILE).is_file():
                raise UserError(
                    f"{config.parent}: an adapter in the form of PEFT, without {LORA_FILE}; cosmos-rl sample takes "
                    "what cosmos-rl export --format diffusers writes"
                )
            base = about.get("base_model_name_or_path")
            if not base:
                raise UserError(
                    f"{config} does not name its base model, which was a local folder: write the path or the hub name "
                    "of that pipeline under base_model_name_or_path"
                )
            return _Source(base, revision or about.get("revision"), folder)
    if place.is_dir() and not (place / "model_index.json").is_file():
        raise UserError(f"{source}: neither a pipeline folder (model_index.json) nor an exported adapter{_hint(place)}")
    if place.is_file():
        raise UserError(f"{source}: neither a pipeline folder nor an exported adapter, but a file{_hint(place)}")
    is_path = source.count("/") > 1 or source.startswith((".", "/", "~"))
    if not place.exists() and (is_path or ("/" in source and place.parent.is_dir())):
        raise UserError(f"{place.absolute()} does not exist")
    return _Source(source, revision, None)


def _hint(place: Path) -> str:
    """What the place is that cannot be sampled from, and what can be, near it."""
    kind = find_kind(place)
    if kind is FileKind.CHECKPOINT:
        return f"; {kind.describe('it')}: cosmos-rl export {shlex.quote(str(place))} --out DIR"
    found = sorted(place.glob("**/model_index.json")) + sorted(place.glob("**/adapter_config.json"))
    if found:
        return f"; there is {found[-1].parent}"
    return "" if kind is None else f"; {kind.describe('it')}"


def _read_class(source: _Source) -> str:
    """The pipeline's class, before its weights are read."""
    import cosmos_rl.policy.model.diffusers  # noqa: F401 (first: diffusers prints of torchao where it finds it)

    # isort: split
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    base = source.base
    if Path(base).expanduser().is_dir():
        base = str(Path(base).expanduser())
    try:
        index: Any = DiffusionPipeline.load_config(base, revision=source.revision)
    except (OSError, ValueError) as error:
        raise UserError(f"{base}: cannot be loaded as a pipeline ({str(error).splitlines()[0]})") from error
    return index["_class_name"]


def _open(source: _Source) -> Any:
    import torch

    from cosmos_rl.policy.model.driver.loading import load_pipeline
    from cosmos_rl.policy.model.quiet import load_adapter

    pipe = load_pipeline(source.base, revision=source.revision)
    pipe.set_progress_bar_config(disable=True)
    if source.adapter is not None:
        load_adapter(pipe, source.adapter)
    return pipe.to("cuda" if torch.cuda.is_available() else "cpu")
