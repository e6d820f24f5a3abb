"""Device code in Triton. Launchers choose constexprs and grids; nothing here knows a model or an arch."""
