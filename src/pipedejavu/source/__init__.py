"""Where a model, its data and its first weights come from, and how they become a job for the engine."""
