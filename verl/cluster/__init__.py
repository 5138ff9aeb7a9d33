"""Where roles run, and how a batch is divided among the processes that hold a role and joined again."""
