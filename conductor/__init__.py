"""The Conductor: decides for each request where it runs (`core`), in a process of its own (`server`), with the cluster's front end beside it
(`gateway`)."""
