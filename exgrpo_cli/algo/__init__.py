"""The mathematics of the update: tensors in, tensors out."""
