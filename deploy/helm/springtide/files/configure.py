"""configure.py CONFIG DIRECTORY: what the pod's processes are started with, from the settings in CONFIG and in the environment."""

import os
import sys
from pathlib import Path
from urllib.parse import quote

from engine.formats.files import describe
from springtide.config import load_config, write_config
from springtide.errors import SpringtideError
from springtide.valkey import with_certificates

source, directory = map(Path, sys.argv[1:])
own = {name: value for name, value in os.environ.items() if name.startswith("SPRINGTIDE_")}
try:
    config = load_config(source, environ=own)
    if "VALKEY_HOST" in os.environ:
        url = f"redis://:{quote(os.environ['VALKEY_PASSWORD'], safe='')}@{os.environ['VALKEY_HOST']}:6379/0"
        tls = config.tls
        if not tls.plaintext_allowed:
            url = with_certificates(url.replace("redis:", "rediss:", 1), str(tls.certificate), str(tls.key), str(tls.ca))
        config = config.model_copy(update={"redis_url": url})
    describe(config.model, config.max_context).save(directory / "model.json")
except SpringtideError as error:
    sys.exit(str(error))
write_config(config, directory / "config.yaml")
