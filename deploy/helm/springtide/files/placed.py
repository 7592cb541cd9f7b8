"""placed.py: whether what Springtide has in this pod is ready: a node that Ray has placed here, or the cluster's head."""

import sys

from deploy.local.rundir import running_clusters

sys.exit(0 if any(record.ready for record in running_clusters()) else "there is nothing here that is ready")
