"""ray_pod.py COMMAND…: keeps Ray running as KubeRay wants it started, and beside it COMMAND, where there is one: the cluster's head.

Nodes that Ray has placed here are nobody's children, and serve on while Ray is away. When the pod is to go, Ray goes first, so that nothing
is placed here any more, and then the nodes leave. The head goes at once: nobody is told to leave, and the next one finds all as it is.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil

from deploy.local.rundir import running_clusters

RAY = ("bash", "-c", 'eval "exec $KUBERAY_GEN_RAY_START_CMD"')
LOOK_EVERY_S = 1.0
RAY_ENDS_S = 10.0
AT_ONCE = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
"""How long Ray itself would wait for what it has placed."""

going: list[int] = []


def ray_is_there() -> bool:
    return subprocess.run(("ray", "health-check"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def leave(ray: "subprocess.Popen[bytes] | None") -> None:
    """Returns when nothing is left here that serves."""
    if ray is not None:
        ray.terminate()
        try:
            ray.wait(RAY_ENDS_S)
        except subprocess.TimeoutExpired:
            ray.kill()
    nodes = []
    for record in running_clusters():
        with contextlib.suppress(psutil.NoSuchProcess):
            nodes.append(psutil.Process(record.pid))
            nodes[-1].terminate()
    psutil.wait_procs(nodes)


def main() -> None:
    command = sys.argv[1:]
    ray: subprocess.Popen[bytes] | None = None
    beside: subprocess.Popen[bytes] | None = None
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: going.append(number))
    while not going:
        if ray is None or ray.poll() is not None:
            ray = subprocess.Popen(RAY, env={**os.environ, **AT_ONCE})
        if command and (beside is None or beside.poll() is not None) and ray_is_there():
            beside = subprocess.Popen(command)
        time.sleep(LOOK_EVERY_S)
    if not command:
        leave(ray)
    elif beside is not None:
        beside.kill()  # its processes end with it


main()
