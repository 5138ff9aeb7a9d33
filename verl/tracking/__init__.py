"""Where the numbers, samples and log lines of a run go."""
