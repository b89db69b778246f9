"""Files of a model that are not whole are named, whatever reads them."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cosmos_rl.distributed.sharding import find_weight_files
from cosmos_rl.errors import UserError
from cosmos_rl.storage.weight_files import open_weights, read_table
from tests.support.rights import without_rights

NAME = "diffusion_pytorch_model.safetensors"


def write(file: Path, *, cut: bool = False) -> Path:
    save_file({f"{file.name}.weight": np.arange(6.0)}, file)
    if cut:
        file.write_bytes(file.read_bytes()[:-1])  # the header is whole
    return file


def test_weights_are_read_and_a_file_that_is_not_whole_is_named(tmp_path: Path) -> None:
    with open_weights(write(tmp_path / "whole"), "np") as opened:
        assert list(opened.get_tensor("whole.weight")) == [0, 1, 2, 3, 4, 5]
    (tmp_path / "text").write_text("a cat\nanother cat")
    (tmp_path / "empty").touch()
    write(tmp_path / "cut", cut=True)
    for name in ("text", "empty", "cut"):
        why = rf"/{name}: is not a complete \.safetensors file \(.+\); copy, download"
        with pytest.raises(UserError, match=why), open_weights(tmp_path / name):
            pass
    for name, reason in {"nowhere": "No such file or directory", ".": "Is a directory"}.items():
        why = rf": cannot be read \({reason}\); look at its path"
        with pytest.raises(UserError, match=why), open_weights(tmp_path / name):
            pass


def test_weights_and_tables_that_may_not_be_read_are_no_broken_ones(closed_folder: Path) -> None:
    why = r": cannot be read \(Permission denied\); look at its path and its permissions$"
    with (
        without_rights(),
        pytest.raises(UserError, match=rf"^{closed_folder}/a\.safetensors{why}"),
        open_weights(closed_folder / "a.safetensors"),
    ):
        pass
    with without_rights(), pytest.raises(UserError, match=rf"^{closed_folder}/a\.json{why}"):
        read_table(closed_folder / "a.json")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_names_of_files_is_named(tmp_path: Path, content: str) -> None:
    index = tmp_path / f"{NAME}.index.json"
    index.write_text(content)
    with pytest.raises(UserError, match=f"^{index}: has no weight_map of names of files; copy, download"):
        find_weight_files(tmp_path)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_model_whose_last_file_is_cut_off_is_refused_by_the_name_of_the_file(tmp_path: Path, shards: int) -> None:
    files = [tmp_path / NAME] if shards == 1 else [tmp_path / f"{number}.safetensors" for number in range(shards)]
    for file in files:
        write(file)
    weights = {f"{file.name}.weight": file.name for file in files}
    if shards > 1:
        (tmp_path / f"{NAME}.index.json").write_text(json.dumps({"weight_map": weights}))
    assert find_weight_files(tmp_path) == {name: tmp_path / file for name, file in weights.items()}
    write(files[-1], cut=True)
    with pytest.raises(UserError, match=f"{files[-1].name}: is not a complete"):
        find_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b'{"r": ', "cannot be read as JSON"), (b"\xff\xfe", "cannot be read as JSON"), (b"[]", "holds no table")],
)
def test_a_table_that_is_none_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "model_index.json"
    with pytest.raises(UserError, match=rf"{file}: cannot be read \(No such file or directory\)"):
        read_table(file)
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file}: {problem}"):
        read_table(file)
    file.write_text('{"r": 1}')
    assert read_table(file) == {"r": 1}
