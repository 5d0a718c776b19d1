from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scenarios"))
sys.path.insert(0, str(Path(__file__).parent))

from process_fixtures import backend, fleet, make_fleet, pool, scheme  # noqa: F401
