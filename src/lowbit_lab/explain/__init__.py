"""What serves a product, a layer or a network, why, and how fast it should be."""
