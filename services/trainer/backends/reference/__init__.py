"""Plain transformers and torch: the backend that defines right answers.

Imports nothing, so that tools may look at single modules; the registry names the class.
"""
