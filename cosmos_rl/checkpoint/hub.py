"""Upload of the final export to the Hugging Face hub: tried again for a while, then looked at file by file."""

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.hf_api import RepoFile

from cosmos_rl.checkpoint.card import is_local
from cosmos_rl.errors import UserError
from cosmos_rl.utils.logging import logger

DEADLINE_S = 600.0
"""So long after the first failure no further attempt is begun."""
_PASSING = (408, 409, 425, 429)  # with all from 500 on: answers that may change by themselves
_FINAL = (ValueError, TypeError, LookupError, AttributeError, LocalTokenNotFoundError, OfflineModeIsEnabled)
_NAMES_A_SOURCE = ("base_model_name_or_path", "_name_or_path")
"""Keys of PEFT's and diffusers' files; both take null: whoever loads an adapter names the base."""
_MADE_BY_THE_HUB = {".gitattributes"}


class IncompleteUpload(Exception):
    """The repository does not hold what was uploaded."""


def require_token(repository: str) -> None:
    """Raise ``UserError`` when there is no token: better before a training run than after it."""
    if get_token() is None:
        raise UserError(
            f'train.ckpt.upload_hf = true (hf_repo_name = "{repository}"), but there is no token of the hub: '
            "`hf auth login` or set HF_TOKEN"
        )


def upload(
    folder: Path,
    repository: str,
    run_name: str,
    describe: Callable[[str], None] = lambda repository: None,
    *,
    deadline_s: float = DEADLINE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Upload ``folder`` as a model repository; the full name of the repository.

    A repository that does not exist is made private. Of an existing one no file is removed. From which folder of
    this machine a part or the base model came is left out.

    Args:
        folder: what is uploaded; it is only read, except by ``describe``.
        repository: ``owner/name``; a name alone becomes ``<user>/<name>-<run_name>``.
        run_name: start time of the run.
        describe: called with the full name before each upload; may write into ``folder``.
        deadline_s: so long after the first failure no further attempt is begun.
        sleep: waits between attempts.

    Raises:
        UserError: it did not work; the folder is as it was.
    """
    known, first_failure, pause = repository, None, 1.0
    api = HfApi(library_name="cosmos-rl")
    while True:
        try:
            known = repository
            if "/" not in repository:
                known = f"{api.whoami()['name']}/{repository}-{run_name}"
            api.create_repo(known, exist_ok=True, private=True)
            describe(known)
            with _link_without_local_paths(folder) as sent:
                commit = api.upload_folder(repo_id=known, folder_path=sent, commit_message=f"cosmos-rl run {run_name}")
                _verify(api, sent, known, commit.oid)
            logger.info(f"Uploaded {folder} to {api.endpoint}/{known}")
            return known
        except Exception as error:
            now = time.monotonic()
            if first_failure is None:
                first_failure = now
            if not _may_pass(error) or now + pause - first_failure > deadline_s:
                raise UserError(_build_message(known, folder, error)) from error
            logger.warning(f"upload to {known}: {_first_line(error)}; next attempt in {pause:.0f}s")
        sleep(pause)
        pause = min(2 * pause, 60.0)


@contextlib.contextmanager
def _link_without_local_paths(folder: Path) -> Iterator[Path]:
    """A folder of links to the files of ``folder``, except for JSON files that name a path of this machine."""
    with tempfile.TemporaryDirectory(prefix="cosmos-rl-upload-") as made:
        for file in (path for path in sorted(folder.rglob("*")) if path.is_file()):
            target = Path(made) / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            content = None
            if file.suffix == ".json":
                content = json.loads(file.read_text(encoding="utf-8"))
            named = [key for key in _NAMES_A_SOURCE if isinstance(content, dict) and is_local(content.get(key))]
            if content is None or not named:
                target.symlink_to(file.absolute())
            else:
                target.write_text(
                    json.dumps({**content, **dict.fromkeys(named)}, indent=2, sort_keys=True), encoding="utf-8"
                )
        yield Path(made)


def _verify(api: HfApi, folder: Path, repository: str, revision: str) -> None:
    local = {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    entries = api.list_repo_tree(repository, recursive=True, revision=revision)
    remote = {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}
    wrong = [f"{name} is missing" for name in local if name not in remote]
    sizes = ((name, size, remote[name]) for name, size in local.items() if name in remote)
    wrong += [f"{name} has {there} bytes, not {here}" for name, here, there in sizes if here != there]
    if wrong:
        text = f"after the upload {'; '.join(wrong[:5])}"
        if len(wrong) > 5:
            text += " ..."
        raise IncompleteUpload(text)
    foreign = sorted(set(remote) - set(local) - _MADE_BY_THE_HUB)
    if foreign:
        logger.warning(f"{repository} also holds files that are not of this run: {', '.join(foreign[:5])}")


def _may_pass(error: Exception) -> bool:
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return error.response.status_code in _PASSING or error.response.status_code >= 500
    return not isinstance(error, _FINAL)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _build_message(repository: str, folder: Path, error: Exception) -> str:
    return (
        f"the export was not uploaded to {repository} (train.ckpt.hf_repo_name): {_first_line(error)}\n"
        f"  it is complete in {folder.absolute()}; once that is fixed: hf upload {repository} {folder.absolute()}"
    )
