"""Why a product runs as it does."""
