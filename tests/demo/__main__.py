"""The demo: two real sandboxes through a small pod life, each step proven by the kernel."""

from __future__ import annotations

import sys

from tests.demo.story import main

sys.exit(main())
