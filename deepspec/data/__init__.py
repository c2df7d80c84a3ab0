"""From prompts to token batches: reading, answering, masking, loading and target features."""
