"""What each worker may use of the budget, what the kernel says it does use, and what follows if that is more.

`grant` and `shrink` are pure decisions, `truth` reads the kernel's figures, `keeper` acts.
"""
