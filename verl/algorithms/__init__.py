"""What makes one algorithm differ from another: advantages, policy and value losses, and the KL to the reference."""
