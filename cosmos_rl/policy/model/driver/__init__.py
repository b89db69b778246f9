"""Any flow-matching diffusers pipeline as a trainable model: its own `__call__` is the code, held at four seams.

- `contract`: what training asks of a model.
- `seams`: one call of the stock pipeline with our state, grid and step inside.
- `conditions`: what the text encoders made, row by row.
- `driver`: the contract, fulfilled by such calls.
- `facts`, `probe`: what was found out about a pipeline, and the checks that prove it may be driven.
- `rows`: the one table of what cannot be found out by looking.
"""
