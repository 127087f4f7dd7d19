"""The folder of the helpers on the path, and the one of the data path model."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parent
for folder in (FOLDER, FOLDER.parent / "numerics"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
