"""command.py COMMAND ARGUMENT…: `springtide COMMAND ARGUMENT…`, of the cluster that this pod is in."""

import os
import sys
from pathlib import Path

import yaml

config = yaml.safe_load(Path("/run/springtide/config.yaml").read_text())
for name in ("certificate", "key", "ca"):
    if name in config["tls"]:
        os.environ[f"SPRINGTIDE_TLS__{name.upper()}"] = config["tls"][name]
os.execvp("springtide", ["springtide", *sys.argv[1:], "--redis-url", config["redis_url"], "--cluster", config["cluster"]])
