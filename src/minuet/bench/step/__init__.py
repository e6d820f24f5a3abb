"""One prepared step, measured."""
