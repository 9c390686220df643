"""Any transformers model, cut over all ranks by torch's fully_shard.

Imports nothing, so that tools may look at single modules; the registry names the class.
"""
