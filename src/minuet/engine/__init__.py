"""The engine: requests, pages, the scheduler, the step, and the loop around them."""
