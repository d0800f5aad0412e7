"""What every test shares: the same examples on every machine, and no terminal's colours."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadline: a busy machine is no failure. No database: a run depends on the code alone.
settings.register_profile("bringup", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("bringup")

os.environ["NO_COLOR"] = "1"
os.environ.pop("FORCE_COLOR", None)
