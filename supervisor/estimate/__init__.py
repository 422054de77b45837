"""How much memory a model will take, told from its config and its files' headers before anything is loaded.

`estimate.estimate` is the way in. Weights are never read, and nothing of MLX is imported.
"""
