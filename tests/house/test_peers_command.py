"""What `python -m benchmarks.peers` says of checkouts and digits that are not as it needs them; nothing is trained."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks.peers import given
from benchmarks.peers.__main__ import main
from benchmarks.peers.given import Peer, check_digits
from cosmos_rl.errors import UserError
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@localhost", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one commit, which is nobody's."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    git(folder, "init", "--quiet")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "empty")
    return folder


def test_a_missing_folder_is_answered_with_the_repository_the_commit_and_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "nft"
    assert main(["--nft", str(there), "--grpo", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {there}: no such folder; --nft wants https://github.com/NVlabs/DiffusionNFT at commit 24af555:\n"
        f"  git clone https://github.com/NVlabs/DiffusionNFT {there} && git -C {there} checkout 24af555\n"
    )


def test_another_commit_is_answered_with_the_command_that_gets_the_right_one(
    tmp_path: Path, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, repository = git(checkout, "rev-parse", "HEAD"), "https://github.com/yifan123/flow_grpo"
    assert main(["--nft", str(tmp_path), "--grpo", str(checkout)]) == 2
    assert capsys.readouterr().err == (
        f"error: {checkout}: is commit {found[:7]}; --grpo wants {repository} at commit ac4c86e:\n"
        f"  git -C {checkout} fetch {repository} && git -C {checkout} checkout ac4c86e\n"
    )


def test_the_right_commit_passes_and_files_without_git_are_left_to_the_changes(checkout: Path, tmp_path: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    peer = Peer("https://example.org/theirs", commit[:7])
    assert peer.check("--nft", checkout) == f"{checkout}: commit {commit[:7]} of https://example.org/theirs"
    inside = checkout / "unpacked"  # in a checkout of something else, whose commit says nothing of it
    inside.mkdir()
    for folder in (tmp_path, inside):
        assert peer.check("--nft", folder).startswith(f"{folder}: its commit is not known")


def test_files_that_are_no_peer_are_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--nft", str(tmp_path), "--grpo", str(tmp_path), "--digits", str(tmp_path / "digits")]) == 2
    assert f"error: {tmp_path}: no folder config; give the root of a checkout" in capsys.readouterr().err
    assert not (tmp_path / "digits").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--grpo", "x"], "the following arguments are required: --nft"),
        (["--nft", "x", "--grpo", "x", "--only", "speed"], "argument --only: invalid choice: 'speed'"),
        (["--nft", "x", "--grpo", "x", "--seeds", "one"], "argument --seeds: invalid int value: 'one'"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_start_without_its_digits_is_named(tmp_path: Path) -> None:
    check_digits(tmp_path / "to be made")
    kept = tmp_path / "kept"
    export = kept / "sft" / "safetensors" / "step_300"
    export.mkdir(parents=True)
    lacks = rf"{kept}: lacks {kept}/data/prompts.txt, {kept}/data/validation; remove {kept}/sft"
    with pytest.raises(UserError, match=lacks):
        check_digits(kept)
    (kept / "data" / "validation").mkdir(parents=True)
    (kept / "data" / "prompts.txt").write_text("a digit")
    check_digits(kept)
    export.rmdir()
    with pytest.raises(UserError, match=re.escape("lacks " + str(export.with_name("step_<N>")))):
        check_digits(kept)
    with pytest.raises(UserError, match="is a file; --digits is the folder"):
        check_digits(kept / "data" / "prompts.txt")


def test_the_page_has_the_same_commands() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for peer, folder in ((given.NFT, "nft"), (given.GRPO, "grpo")):
        assert f"git clone {peer.address} {folder} && git -C {folder} checkout {peer.commit}\n" in page
