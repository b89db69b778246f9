"""`cosmos-rl check-model`: can a diffusers pipeline be trained without code of its own, and how."""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from cosmos_rl.errors import UserError
from cosmos_rl.launcher.file_kinds import FileKind, find_kind
from cosmos_rl.launcher.flags import FlagParser
from cosmos_rl.launcher.geometry import save_geometry
from cosmos_rl.launcher.pipeline_files import locate_pipeline

EPILOG = """
The pipeline is run a few dozen times at its smallest size: its own call, held at four places, must give the stock
result bit for bit, repeat each velocity, let gradients through and take media forth and back. docs/models.md explains
every check and says what to do when one fails.

exit code: 0 every check passed, 2 one failed or the pipeline cannot be loaded
"""


def check_model(argv: Sequence[str]) -> int:
    """Examine a diffusers pipeline: prove that it can be driven, and print how."""
    parser = FlagParser(
        prog="cosmos-rl check-model",
        description=check_model.__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", help="a pipeline folder or a hub name")
    parser.add_argument(
        "--size", type=int, nargs="+", metavar="N", help="H W, or H W FRAMES, in pixels; default: the smallest sensible"
    )
    parser.add_argument("--max-prompt-length", type=int, metavar="N", help="tokens; default: the pipeline's own")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of all parts (float32)")
    parser.add_argument("--device", default="cpu", help="for example cuda (cpu)")
    parser.add_argument("--revision", help="of the hub repository")
    parser.add_argument("--again", action="store_true", help="examine even if the result is known from an earlier time")
    given = parser.parse_args(argv)
    if given.size and len(given.size) not in (2, 3):
        raise UserError(f"--size {' '.join(map(str, given.size))}: give H W, or H W FRAMES")
    kind = find_kind(Path(given.path))
    if kind not in (None, FileKind.PIPELINE):
        raise UserError(f"{kind.describe(given.path)}. cosmos-rl check-model takes a pipeline folder or a hub name")
    _examine(given)
    return 0


def _examine(given: argparse.Namespace) -> None:
    import torch  # seconds, so only once the command line is known to be right

    import cosmos_rl.policy.model.diffusers  # noqa: F401 (imports diffusers without what prints warnings)
    from cosmos_rl.launcher.check.measure import measure_geometry
    from cosmos_rl.policy.model.driver.contract import Size
    from cosmos_rl.policy.model.driver.driver import Driver
    from cosmos_rl.policy.model.driver.facts import Check
    from cosmos_rl.policy.model.driver.loading import load_pipeline
    from cosmos_rl.policy.model.driver.probe import prove
    from cosmos_rl.storage.cache_folder import facts_folder

    pipeline = load_pipeline(given.path, dtype=getattr(torch, given.dtype), revision=given.revision).to(given.device)
    call, size = {}, None
    if given.max_prompt_length:
        call = {"max_sequence_length": given.max_prompt_length}
    if given.size:
        size = Size(*given.size)
    driver = Driver(pipeline, call=call, size=size)

    def report(check: Check) -> None:
        line = f"passed  {check.name}"
        if check.detail:
            line += f" ({check.detail})"
        print(line, flush=True)

    facts = prove(driver, cache=facts_folder(), again=given.again, report=report)
    print()
    geometry = measure_geometry(driver)
    save_geometry(locate_pipeline(given.path, given.revision), geometry)
    table = [*facts.table(), ("sizes", geometry.describe())]
    width = max(len(what) for what, _ in table)
    for what, value in table:
        lines = textwrap.wrap(value, 100) or [""]
        print(f"{what:{width}}  {lines[0]}")
        for line in lines[1:]:
            print(f"{'':{width}}  {line}")
