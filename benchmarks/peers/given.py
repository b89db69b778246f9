"""What a user hands over: checkouts of the peers, which they must be and how to get them, and the folder of digits."""

import importlib.util
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cosmos_rl.errors import UserError


@dataclass(frozen=True)
class Peer:
    """A repository, at the commit that the changes are for."""

    address: str
    commit: str
    """As many of its digits as name it."""

    def check(self, flag: str, checkout: Path) -> str:
        """What the checkout is, as one line.

        Raises:
            UserError: there is no such folder, or it is another commit; with the commands that get the right one.
        """
        wanted, place = f"{flag} wants {self.address} at commit {self.commit}", shlex.quote(str(checkout))
        if not checkout.is_dir():
            raise UserError(
                f"{checkout}: no such folder; {wanted}:\n"
                f"  git clone {self.address} {place} && git -C {place} checkout {self.commit}"
            )
        found = _read_commit(checkout)
        if not found:
            return f"{checkout}: its commit is not known, as git finds no checkout there; {wanted}"
        if not found.startswith(self.commit):
            raise UserError(
                f"{checkout}: is commit {found[: len(self.commit)]}; {wanted}:\n"
                f"  git -C {place} fetch {self.address} && git -C {place} checkout {self.commit}"
            )
        return f"{checkout}: commit {self.commit} of {self.address}"


NFT = Peer("https://github.com/NVlabs/DiffusionNFT", "24af555")
GRPO = Peer("https://github.com/yifan123/flow_grpo", "ac4c86e")


def check_digits(folder: Path) -> None:
    """Whether the start and its data are in ``folder``, or can be made there.

    Raises:
        UserError: it is a file, or has only a part of them; or scikit-learn, which has the digits, is not installed.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise UserError('the digits and their judges need scikit-learn: pip install "cosmos_rl[quickstart]"')
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; --digits is the folder where the fine-tuned start is kept, or made")
    start, data = folder / "sft" / "safetensors", folder / "data"
    if not start.exists():
        return
    missing = [str(path) for path in (data / "prompts.txt", data / "validation") if not path.exists()]
    if not any(start.glob("step_*")):
        missing.append(f"{start}/step_<N>")
    if missing:
        raise UserError(
            f"{folder}: lacks {', '.join(missing)}; remove {folder / 'sft'}, then all is made again, or name another "
            "folder by --digits"
        )


def _read_commit(folder: Path) -> str:
    """All digits; empty where the folder is not the root of a checkout, but perhaps inside another one."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(folder), "rev-parse", "--show-prefix", "HEAD"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30)
    prefix, _, commit = done.stdout.partition("\n")
    if done.returncode or prefix:
        return ""
    return commit.strip()
