"""Logits to tokens: the definition in plain torch (``reference``), its generator, its sizes.

The fast form of every function of ``reference`` is in ``minuet.ops.triton.sampling``.
"""
