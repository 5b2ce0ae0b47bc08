"""Native `torch.utils.data`: samplers, collates and batch types."""
