"""What every floor may use: seeds, redaction, and the check of the environment."""
