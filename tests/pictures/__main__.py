"""Draw the pictures of the pages: `python -m tests.pictures [FOLDER]`; needs matplotlib, of the extra `docs`."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.pictures import PICTURES, draw

draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES)
