"""The card of the final export and its upload, against a small hub on this machine."""

import base64
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from huggingface_hub import constants

from cosmos_rl.checkpoint import hub
from cosmos_rl.checkpoint.card import write_card
from cosmos_rl.errors import UserError
from cosmos_rl.policy.config import Config, load_config
from cosmos_rl.tracking.media import Shown, save_gallery
from tests.support.trainer_runs import train

VALIDATION = '[validation]\nenable = true\nfreq = 2\ndataset.local_dir = "{}"'
UPLOAD = ("--train.ckpt.upload_hf=true", "--train.max_num_steps=2")


class StubHub(ThreadingHTTPServer):
    """As much of the hub's interface as an upload needs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.files: dict[str, dict[str, bytes]] = {}
        self.created: list[dict[str, Any]] = []
        self.blobs: dict[str, bytes] = {}
        self.refusals: list[int] = []
        """Codes that the next requests to make a repository are answered with."""
        self.lost = ""
        """Name of a file that commits leave out."""


class _Handler(BaseHTTPRequestHandler):
    server: StubHub

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, body: object, code: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_GET(self) -> None:
        found = re.match(r"/api/models/([^/]+/[^/]+)/tree/", self.path)
        if self.path == "/api/whoami-v2":
            self._answer({"name": "ann", "type": "user"})
        elif found:
            files = self.server.files[found[1]].items()
            self._answer([{"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in files])
        else:
            self._answer({"error": self.path}, 404)

    def do_PUT(self) -> None:
        self.server.blobs[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        body, path, hub = self._body(), self.path.partition("?")[0], self.server
        found = re.match(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path)
        if path == "/api/repos/create" and hub.refusals:
            self._answer({"error": "not now"}, hub.refusals.pop(0))
        elif path == "/api/repos/create":
            asked = json.loads(body)
            hub.created.append(asked)
            name = f"{asked.get('organization', 'ann')}/{asked['name']}"
            hub.files.setdefault(name, {".gitattributes": b"*.safetensors filter=lfs"})
            self._answer({"url": f"{hub.url}/{name}", "id": "1"})
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            uploads = [{**o, "actions": {"upload": {"href": f"{hub.url}/blob/{o['oid']}"}}} for o in wanted]
            self._answer({"transfer": "basic", "objects": uploads})
        elif found and found[2] == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            self._answer({"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]})
        elif found:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file" and value["path"] != hub.lost:
                    hub.files[found[1]][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile" and value["path"] != hub.lost:
                    hub.files[found[1]][value["path"]] = hub.blobs[value["oid"]]
            oid = "1" * 40
            self._answer({"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{found[1]}/commit/{oid}"})
        else:
            self._answer({"error": path}, 404)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    server = StubHub()
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Something to upload."""
    made = tmp_path / "export"
    (made / "media").mkdir(parents=True)
    (made / "model.safetensors").write_bytes(bytes(range(200)))
    (made / "README.md").write_text("---\nlibrary_name: diffusers\n---\n# x\n")
    (made / "media" / "a.png").write_bytes(b"png")
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_run_uploads_its_adapter_with_a_card_to_a_repository_named_after_user_and_run(
    stub: StubHub, write_toml: Callable[..., Path], image_folder: Path, tiny_sd3: Path
) -> None:
    config = write_toml(VALIDATION.format(image_folder))
    run = train(config, *UPLOAD, "--train.ckpt.hf_repo_name=digits")
    name = f"ann/digits-{run.name}"
    local = contents(run / "safetensors/step_2/lora")
    assert {"README.md", "model.safetensors", "adapter_config.json"} < local.keys()
    there = stub.files[name]
    del there[".gitattributes"]
    sent, kept = (json.loads(files.pop("adapter_config.json")) for files in (there, local))
    assert kept["base_model_name_or_path"] == str(tiny_sd3)  # `cosmos-rl sample` loads it from there
    assert sent == {**kept, "base_model_name_or_path": None}
    assert there == local
    assert not any(str(tiny_sd3.parent).encode() in content for content in there.values())
    assert stub.created == [{"name": f"digits-{run.name}", "organization": "ann", "visibility": "private"}]
    assert f'pipe.load_lora_weights("{name}", weight_name="model.safetensors"' in local["README.md"].decode()


def test_an_upload_names_no_folder_of_this_machine_and_the_rest_is_as_it_was(stub: StubHub, folder: Path) -> None:
    (folder / "vae").mkdir()
    files = {"model_index.json": "/home/ann/base", "vae/config.json": "../base/vae", "other.json": "some/model"}
    for name, source in files.items():
        (folder / name).write_text(json.dumps({"_name_or_path": source, "x": 1}))
    before = contents(folder)
    hub.upload(folder, "team/model", "20260101000000")
    assert contents(folder) == before
    there = {name: json.loads(stub.files["team/model"][name]) for name in files}
    assert [content["_name_or_path"] for content in there.values()] == [None, None, "some/model"]
    assert all(content["x"] == 1 for content in there.values())


def test_a_name_with_an_owner_is_taken_as_it_is_and_files_of_others_stay(
    stub: StubHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.files["team/model"] = {"LICENSE": b"theirs"}
    assert hub.upload(folder, "team/model", "20260101000000") == "team/model"
    assert stub.files["team/model"] == {"LICENSE": b"theirs", **contents(folder)}
    assert "also holds files that are not of this run: LICENSE" in capsys.readouterr().out


def test_an_answer_that_may_pass_is_tried_again(
    stub: StubHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.refusals = [503, 503]
    slept: list[float] = []
    hub.upload(folder, "team/model", "20260101000000", sleep=slept.append)
    assert contents(folder).items() <= stub.files["team/model"].items()
    assert slept == [1.0, 2.0]
    assert capsys.readouterr().out.count("next attempt in") == 2


def test_a_refusal_ends_the_run_with_an_error_and_keeps_the_export(
    stub: StubHub, write_toml: Callable[..., Path]
) -> None:
    stub.refusals = [403]
    config = write_toml()
    with pytest.raises(UserError, match="not uploaded to team/model .*: .*403") as caught:
        train(config, *UPLOAD, "--train.ckpt.hf_repo_name=team/model")
    (run,) = [p for p in (config.parent / "out").iterdir() if p.name.isdigit()]
    export = run / "safetensors/step_2/lora"
    assert f"hf upload team/model {export}" in str(caught.value)
    assert {"README.md", "model.safetensors", "adapter_config.json"} <= contents(export).keys()
    assert stub.refusals == []
    assert stub.files == {}


def test_a_server_that_stays_away_is_given_up_at_the_deadline(stub: StubHub, folder: Path) -> None:
    stub.refusals = [503] * 10
    slept: list[float] = []
    with pytest.raises(UserError, match="503"):
        hub.upload(folder, "team/model", "20260101000000", deadline_s=5.0, sleep=slept.append)
    assert slept == [1.0, 2.0, 4.0]


def test_a_file_that_did_not_arrive_is_an_error(stub: StubHub, folder: Path) -> None:
    stub.lost = "media/a.png"
    with pytest.raises(UserError, match="after the upload media/a.png is missing"):
        hub.upload(folder, "team/model", "20260101000000", deadline_s=0.0)


def test_a_run_that_could_not_upload_is_refused_before_it_trains(
    write_toml: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "get_token", lambda: None)
    config = write_toml()
    with pytest.raises(UserError, match="no token of the hub: `hf auth login`"):
        train(config, *UPLOAD, "--train.ckpt.hf_repo_name=team/model")
    assert list((config.parent / "out").glob("*/safetensors/*")) == []


def test_the_card_of_a_pipeline_says_what_it_is_and_names_no_path_of_this_machine(
    write_toml: Callable[..., Path], image_folder: Path, tiny_sd3: Path
) -> None:
    text = VALIDATION.format(image_folder) + '\n[custom]\npassword = "secret"\n'
    run = train(write_toml(text, lora=False), "--train.max_num_steps=2")
    export = run / "safetensors/step_2"
    card = (export / "README.md").read_text()
    front = card.split("---")[1]
    wanted = ["library_name: diffusers", "pipeline_tag: text-to-image", "tags:", "- cosmos-rl", "- sft", "- full"]
    assert front.strip().splitlines() == wanted
    for private in (str(tiny_sd3), str(image_folder), str(run.parent), "secret"):
        assert private not in card
    shown = re.findall(r"!\[\]\((media/\S+)\) \| (.*) \|", card)
    assert [prompt for _, prompt in shown] == [f"a photo of the number {i}" for i in range(4)]
    newest = run / "media/validation/step_2"
    assert all((export / file).read_bytes() == (newest / Path(file).name).read_bytes() for file, _ in shown)
    table = tomllib.loads(card.split("````toml\n")[1].split("````")[0])
    assert table["train"]["optm_lr"] == 1e-2
    assert table["policy"]["model_name_or_path"] == ".../sd3"
    assert f"torch {torch.__version__.partition('+')[0]}" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("path/to/this/folder", str(export)), names)
    assert isinstance(names["pipe"], DiffusionPipeline)
    assert names["image"].size == (32, 32)
    assert "'a photo of the number 0'" in code
    assert "max_sequence_length=16" in code


def test_the_snippet_of_an_adapter_loads_it(write_toml: Callable[..., Path], tiny_sd3: Path) -> None:
    run = train(write_toml(), "--train.max_num_steps=1")
    export = run / "safetensors/step_1/lora"
    card = (export / "README.md").read_text()
    assert "## Validation images" not in card
    assert not (export / "media").exists()
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("path/to/the/base", str(tiny_sd3)).replace("path/to/this/folder", str(export)), names)
    assert names["pipe"].get_active_adapters() == ["default"]
    assert names["image"].size == (32, 32)
    assert "ComfyUI" in card


def test_a_base_of_the_hub_is_named_and_strange_prompts_stay_in_their_cell(tmp_path: Path) -> None:
    black = torch.zeros(4, 4, 3, dtype=torch.uint8)
    save_gallery(tmp_path / "media/validation/step_9", [Shown(black, "later", i) for i in range(2)])
    save_gallery(tmp_path / "media/validation/step_4", [Shown(black, "a | b\n<script>", i) for i in range(2)])
    config = Config.from_dict({"policy": {"model_name_or_path": "stabilityai/stable-diffusion-3.5-medium"}})
    (tmp_path / "export").mkdir()
    write_card(tmp_path / "export", config, tmp_path / "media", step=5)
    card = (tmp_path / "export/README.md").read_text()
    assert 'base_model: "stabilityai/stable-diffusion-3.5-medium"\n' in card
    assert card.count("![](media/") == 1
    assert "| a &#124; b &lt;script&gt; |" in card


def test_upload_needs_the_name_of_a_repository(write_toml: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="hf_repo_name: missing"):
        load_config(write_toml(), ["--train.ckpt.upload_hf=true"])
