"""The name that older documents have for `diffusion_nft`; a launch takes the script of the job in its place."""

from cosmos_rl.launcher import worker_entry
from cosmos_rl.tools.dataset.diffusion_nft import training_prompts, validation_prompts

if __name__ == "__main__":
    worker_entry.main(dataset=training_prompts, val_dataset=validation_prompts)
