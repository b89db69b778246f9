"""One rank of a training job: `python -m tests.support.rank_job CONFIG RUN_FOLDER RESUME_STEP [--a.b=v …]`."""

import sys
from pathlib import Path

from cosmos_rl.checkpoint.layout import policy_dir
from cosmos_rl.policy.config import load_config
from cosmos_rl.policy.trainer import run
from cosmos_rl.storage.run_folder import RunFolder
from tests.support.trainer_runs import Stop, bundled_data


def main(config_file: str, folder: str, resume_step: str, *overrides: str) -> int:
    """Train as this rank; RANK, WORLD_SIZE and the rendezvous are in the environment."""
    config = load_config(config_file, list(overrides))
    run_folder = RunFolder(Path(folder))
    resume_from = policy_dir(run_folder.checkpoints, int(resume_step)) if int(resume_step) else None
    return run(
        config,
        run_folder,
        **bundled_data(config),
        resume_from=resume_from,
        stop=Stop(),
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
