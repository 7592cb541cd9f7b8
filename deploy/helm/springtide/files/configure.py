"""configure.py CONFIG DIRECTORY: what the pod's processes are started with, from the settings in CONFIG and in the environment."""

import os
import sys
from pathlib import Path

from engine.formats.files import describe
from springtide.config import load_config, write_config
from springtide.errors import SpringtideError

source, directory = map(Path, sys.argv[1:])
own = {name: value for name, value in os.environ.items() if name.startswith("SPRINGTIDE_")}
try:
    config = load_config(source, environ=own)
    describe(config.model, config.max_context).save(directory / "model.json")
except SpringtideError as error:
    sys.exit(str(error))
write_config(config, directory / "config.yaml")
