"""Programs of host processes. Each module has no imports from this package, so that another interpreter can run it."""
