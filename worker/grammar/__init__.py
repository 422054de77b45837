"""Constrained output: grammars compiled in a process of their own, followed token by token in this one.

`xgr` is the only module that knows xgrammar. Nothing here is loaded before the first request that wants it.
"""
