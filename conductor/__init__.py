"""The Conductor decides for each request where it runs: `core` decides, `server` does, `gateway` is the cluster's front end."""
