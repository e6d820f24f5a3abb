"""The model's arithmetic outside attention: plain torch, what every fast form must equal."""
