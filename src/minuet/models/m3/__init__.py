"""MiniMax-M3, the text model. docs/model.md says what it is; ``spec.py`` reads its config."""
