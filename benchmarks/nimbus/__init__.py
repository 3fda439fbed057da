"""The embedded pair of small models: `corpus` makes the text, `train` makes the weights from it.

`target/` and `draft/` are plain folders for `from_pretrained`; `README.md` is their model card.
"""
