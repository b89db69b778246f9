"""`cosmos-rl create-prompts` under its documented name, from the root of a clone."""

import sys

from cosmos_rl.launcher.cli import main

if __name__ == "__main__":
    sys.exit(main(["create-prompts", *sys.argv[1:]]))
