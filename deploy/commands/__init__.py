"""What the subcommands of `springtide` do."""
