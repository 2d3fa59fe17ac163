"""What all tests share: an empty code cache, and hypothesis without its timed assertions."""

from __future__ import annotations

import os
import tempfile

from hypothesis import settings

# Before lowbit is imported anywhere: the tests compile every kernel anew.
_cache = tempfile.TemporaryDirectory(prefix="lowbit-test-cache-")
os.environ["LOWBIT_CACHE_DIR"] = _cache.name
os.environ.pop("LOWBIT_ISA", None)

settings.register_profile("lowbit", deadline=None)
settings.load_profile("lowbit")
