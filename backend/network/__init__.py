"""The model's network computed our way: the same numbers as mlx-lm's layers, in less time and memory.

`forward` is the door: log-probabilities of completions. `stand_ins` puts attention, recall and gated units where mlx-lm's
models call their own; `exponential` and `products` are what x86 processors are slow at. Nothing here knows of groups,
rewards or runs.
"""
