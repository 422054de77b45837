"""One module for each command of the `mlxhost` command line.

A module imports nothing slow until its command runs, so that `mlxhost --help` answers at once.
"""
