"""How fast the kernels are on this GPU: what `fpquant bench` measures."""
