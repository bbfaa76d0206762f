"""The check that a model's units compute what the model itself computes, before the first update."""
