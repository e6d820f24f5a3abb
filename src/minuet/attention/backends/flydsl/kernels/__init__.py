"""Device code. Imported in the compile subprocess and where kernels are launched, nowhere else."""
