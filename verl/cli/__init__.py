"""The console command `verl`."""
