"""``python -m gcmoe``: the same as the command ``gcmoe``."""

import sys

from gcmoe.cli import main

sys.exit(main())
