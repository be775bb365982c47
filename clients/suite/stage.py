#!/usr/bin/env python3
"""The former name of ``testbed.py``, for callers that have not changed yet."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).with_name("testbed.py")), run_name="__main__")
