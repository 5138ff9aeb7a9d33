"""The replay buffer: scored rows in device memory, in Arrow files on the local disk, and in a store far away."""
