"""`cosmos-rl create-prompts`: a caption file for every video of a folder."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from cosmos_rl.data.pair_files import METAS, list_media
from cosmos_rl.errors import UserError
from cosmos_rl.storage import atomic


def create_prompts(argv: Sequence[str]) -> int:
    """Write the same caption to `metas/<name>.txt` for every `videos/<name>.mp4`; captions that exist are kept."""
    parser = argparse.ArgumentParser(
        prog="cosmos-rl create-prompts", description=create_prompts.__doc__, allow_abbrev=False
    )
    parser.add_argument("--dataset_path", "--dataset-path", type=Path, required=True, metavar="DIR")
    parser.add_argument("--prompt", required=True, help="the caption")
    parser.add_argument("--is_image", "--is-image", action="store_true", help="for images/* instead")
    given = parser.parse_args(argv)
    prompt = " ".join(given.prompt.split())
    if not prompt:
        raise UserError("--prompt: is empty; a caption says what the videos show")
    folder = given.dataset_path.expanduser()
    files = list_media(folder, video=not given.is_image)
    (folder / METAS).mkdir(exist_ok=True)
    captions = [folder / METAS / f"{file.stem}.txt" for file in files]
    missing = [caption for caption in captions if not caption.exists()]
    for caption in missing:
        atomic.write_text(caption, prompt + "\n")
    print(f"{folder / METAS}: {len(missing)} captions written, {len(captions) - len(missing)} kept")
    return 0
