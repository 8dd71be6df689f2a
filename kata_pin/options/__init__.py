"""What a node may also want, a room each; the core imports none of them.

An option may import the core. tests/repo/test_layers.py lists the imports that still go the other
way, or from one option to another.
"""
