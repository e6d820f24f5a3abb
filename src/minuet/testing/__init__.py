"""Tools for testing kernels without the device they are for."""
