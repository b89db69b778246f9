"""Scripts that give a training job its datasets."""
