"""Networks on which quantization is measured: how each is built, fed and judged."""
