"""Language models: where they come from, heads on them, adapters in them."""
