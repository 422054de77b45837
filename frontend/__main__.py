"""`python -I -m mlxhost.frontend`, started by the supervisor only."""

import sys

from mlxhost.frontend.main import main

sys.exit(main())
