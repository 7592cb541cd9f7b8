"""The images: their Dockerfile is as hadolint has it, and its steps, executed, give what serves."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.pins import EXTRAS, requirements

REPOSITORY = Path(__file__).parents[2]
DOCKER = REPOSITORY / "deploy/docker"
TOOLS = ("apt-get", "dpkg-deb", "ip", "unshare")
SCRIPT = """
set -e
id -u
python -c 'import conductor._native, engine._native, kvstore._native, messenger._native, ray, springtide; print(springtide.__file__)'
eval "exec $IMAGE" >/tmp/springtide.log 2>&1 &
for _ in $(seq 120); do eval "$HEALTHCHECK" 2>/dev/null && healthy=1 && break || sleep 0.5; done
test "$healthy" || { cat /tmp/springtide.log; exit 1; }
python - <<'END'
import json, urllib.request
(model,) = json.load(urllib.request.urlopen("http://127.0.0.1:8000/v1/models"))["data"]
body = {"model": model["id"], "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 5}
url, headers = "http://127.0.0.1:8000/v1/chat/completions", {"Content-Type": "application/json"}
request = urllib.request.Request(url, json.dumps(body).encode(), headers)
print("tokens:", json.load(urllib.request.urlopen(request, timeout=60))["usage"]["completion_tokens"])
END
kill -TERM $!
wait $!
echo stopped
"""


def pinned() -> dict[str, Requirement]:
    lines = (DOCKER / "requirements.txt").read_text().splitlines()
    return {requirement.name: requirement for line in lines if not line.startswith("#") for requirement in [Requirement(line)]}


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.prefix, "bin/hadolint")
    ended = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_everything_that_springtide_needs_is_pinned_to_a_version_that_it_takes() -> None:
    there = pinned()
    for requirement in requirements("springtide", EXTRAS):
        name = canonicalize_name(requirement.name)
        assert name in there, f"`make image-pins` writes {name} into deploy/docker/requirements.txt"
        (version,) = there[name].specifier
        assert requirement.specifier.contains(version.version), requirement


@pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, TOOLS)), reason=f"wants root and {', '.join(TOOLS)}")
@pytest.mark.skipif(platform.freedesktop_os_release().get("VERSION_CODENAME") != "bookworm", reason="wants the image's Debian, 12")
@pytest.mark.timeout(400)
def test_the_steps_of_the_cpu_image_give_one_that_serves() -> None:
    build = [sys.executable, "-m", "tests.support.dockerfile", "--target", "cpu", "--build-arg", "TORCH_INDEX=file:///nowhere"]
    command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *build, "--", "/bin/bash", "-c", SCRIPT]
    ended = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=390)
    assert ended.returncode == 0, ended.stdout[-5000:]
    user, springtide, tokens, stopped = ended.stdout.splitlines()[-4:]
    assert (user, tokens, stopped) == ("10001", "tokens: 5", "stopped")
    assert springtide.startswith("/opt/springtide/")
