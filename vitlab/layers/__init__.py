"""Tensors in, tensors out: the parts that networks share."""
