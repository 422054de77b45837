"""`python -I -m mlxhost.worker`: started by the supervisor, with its orders on stdin."""

from mlxhost.worker.main import main

main()
