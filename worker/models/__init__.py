"""The one seam to mlx-lm: its model classes and cache classes, nothing else of it.

mlx-lm has the field's widest set of MLX architectures. Importing the package itself costs 70 to 550 MB a
process (transformers, and torch where it is installed), so the classes are imported without running
`mlx_lm/__init__`.
"""
