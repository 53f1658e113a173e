"""Without hypothesis (`pip install -e '.[dev]'`) the fuzz tests are left out."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("hypothesis") else ["test_*.py"]
