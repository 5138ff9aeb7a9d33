"""The loop, the algorithms that run in it, and the faces that start them."""
