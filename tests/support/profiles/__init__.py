"""What a model costs on the machine of tests, as the setting `profile` takes it. An engine that is told need not measure, which takes two
seconds of a processor at each of its starts; what passes really take corrects it."""

from __future__ import annotations

from pathlib import Path

TINY_PROFILE = str(Path(__file__).with_name("tiny.json"))
"""Of models of `make_tiny_llama`."""
DEMO_PROFILE = str(Path(__file__).with_name("demo.json"))
