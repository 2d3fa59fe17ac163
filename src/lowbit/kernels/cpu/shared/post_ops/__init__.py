"""What may follow a product: one file each."""
