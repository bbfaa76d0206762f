"""The sources of a model, its data and its initial weights, and how they become a job for the engine."""
