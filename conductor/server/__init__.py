"""The Conductor's process: follows the cluster, answers gateways, and leaves every decision to conductor.core."""
