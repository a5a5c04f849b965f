"""`python tests/fuzz [TARGET ...] --seconds N --out FOLDER`, from anywhere."""
from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
sys.exit(importlib.import_module("fuzz.run").main())
