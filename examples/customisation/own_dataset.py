"""All PNG images of a folder under one prompt, which the [custom] table gives."""

from pathlib import Path

from cosmos_rl.data.images import load_image
from cosmos_rl.errors import UserError
from cosmos_rl.launcher import worker_entry
from cosmos_rl.policy.config import Config


class OnePrompt:
    def __init__(self, folder: str, prompt: str, height: int, width: int) -> None:
        self.files = sorted(Path(folder).glob("*.png"))
        self.prompt = prompt
        self.size = (height, width)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"visual": load_image(self.files[index], *self.size), "prompt": self.prompt}


def training_data(config: Config) -> OnePrompt:
    prompt = config.custom.get("prompt")
    if not isinstance(prompt, str):
        raise UserError("custom.prompt: missing; give the prompt of all images")
    return OnePrompt(config.train.train_policy.dataset.local_dir, prompt, *config.policy.diffusers.inference_size)


if __name__ == "__main__":
    worker_entry.main(dataset=training_data)
