"""Launching and operating clusters: the `springtide` command and the supervisor of one machine."""
