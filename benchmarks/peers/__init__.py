"""DiffusionNFT's and flow_grpo's own training loops on the quickstart's digits, next to ours.

    python -m benchmarks.peers --nft DIR --grpo DIR --seeds 0 1 2

DIR are checkouts that the user made; nothing of them is kept here (benchmarks/README.md).
"""
