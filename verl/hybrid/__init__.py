"""A Hugging Face model that trains and generates on one set of weights, for scripts with a loop of their own."""
