"""Device code in Triton. Launchers choose constexprs and grids; no model or arch is known here."""
