"""The console: a page that shows the cluster, and what it is told (docs/console.md)."""
