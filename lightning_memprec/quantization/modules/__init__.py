"""Int8 layers: modules that hold int8 weights and compute with them."""
