"""pipeDejavu: plan, preview and run the training of deep networks on mixed CPU and GPU hardware."""
