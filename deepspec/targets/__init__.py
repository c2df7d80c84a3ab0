"""Target models: one generic adapter, one value a family for the layers that drafts are built from."""
