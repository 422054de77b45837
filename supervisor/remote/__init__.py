"""Machines that serve for a fleet on another one: keys, the fleet's side, and the joining side.

keyring.py    the fleet's server key, who may join, and the bundles to carry over
listener.py   the fleet's control ROUTER on tcp: CURVE, allowlist, monitor
hosts.py      what the fleet knows of each machine, as its reports tell
mirror.py     a machine's report as replicas of the fleet
uplink.py     a joined machine's connection to the fleet
joined.py     `mlxhost join`: a supervisor whose workers serve another machine's fleet
"""
