"""What a host process runs: each module stands alone, so that another interpreter can run it without this package."""
