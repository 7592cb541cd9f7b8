"""Generates the protobuf and gRPC stubs of `proto/` into `springtide/rpc/` (`make proto`)."""

from __future__ import annotations

import importlib.resources
import re
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PROTO_ROOT = REPOSITORY / "proto"
PROTO_PACKAGE = "springtide/v1"
STUB_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(out: Path) -> list[Path]:
    """Writes the stubs of every schema into `out` and returns their paths, sorted.

    The schemas' package is `springtide.v1`, the stubs' is `springtide.rpc`: their import lines are rewritten so.
    """
    from grpc_tools import protoc

    schemas = sorted(str(path.relative_to(PROTO_ROOT)) for path in (PROTO_ROOT / PROTO_PACKAGE).glob("*.proto"))
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [
            "protoc",
            f"-I{PROTO_ROOT}",
            f"-I{well_known}",
            *(f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")),
            *schemas,
        ]
        if protoc.main(arguments) != 0:
            raise SystemExit("protoc failed: see above")
        written = []
        for source in sorted((Path(scratch) / PROTO_PACKAGE).iterdir()):
            text = re.sub(r"\bspringtide\.v1 import", "springtide.rpc import", source.read_text())
            target = out / source.name
            target.write_text(text)
            written.append(target)
    return written


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for path in generate(target):
        print(path)
