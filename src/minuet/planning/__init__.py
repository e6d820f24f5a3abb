"""What will run, decided before anything runs: plain data, no torch.

``resolve`` settles every ``auto``; ``execution.settle`` turns Config x model x arch into an
ExecutionPlan or into every refusal at once; ``memory`` and ``roofline`` are its arithmetic;
``explain`` shows it.
"""
